"""How long a player's turn takes, and when which part of its gradient is there: found by playing it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paragan.comm.bucket import ALL_RECEIVED, Bucket, ExchangeEvent
from paragan.comm.process_group import SingleRankGroup, Work
from paragan.comm.traffic import Traffic
from paragan.core.devices import backend_of
from paragan.game.player import Player
from paragan.game.turn import alternating, play_turns, start_exchanges
from paragan.losses.adversarial import Adversarial
from paragan.plan.profile.profile import NUM_READY_PARTS, TurnProfile
from paragan.strategies.base import make_lockstep_role
from paragan.train.session import Session

WARM_UP_ROUNDS = 1  # rounds of every kind, at every visit
MIN_TIMED_ROUNDS, MAX_TIMED_ROUNDS = 2, 40  # that are timed


class GeneratorTimer:
    """What G's forward passes take, in either player's turn."""

    def __init__(self, player: Player, use_hooks: bool = True):
        net, self.backend, self._starts = player.net, backend_of(player.flat.params.device), list[Any]()
        self._intervals: list[tuple[Any, Any]] = []
        self._hooks = [
            net.register_forward_pre_hook(self._on_forward_start),
            net.register_forward_hook(self._on_forward_end),
        ]
        if not use_hooks:
            self.close()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_forward_start(self, *_: Any) -> None:
        self._starts.append(self.backend.record_time())

    def _on_forward_end(self, *_: Any) -> None:
        self._intervals.append((self._starts.pop(), self.backend.record_time()))

    def pop_seconds(self) -> float:
        """Of all since it was asked last; once all is done."""
        passes, self._intervals = self._intervals, []
        return sum(self.backend.elapsed_s(*one) for one in passes)


class TimingExchange:
    """An exchange with nobody, which notes when what of its player's turn was done.

    hooks: whether every parameter tells when its gradient is there (where passes are replayed, none does).
    """

    def __init__(self, player: Player, generator_timer: GeneratorTimer, use_hooks: bool = True):
        self.player, self.generator_timer, self.device = player, generator_timer, player.flat.params.device
        self.backend = backend_of(self.device)
        self.turn_times: list[tuple[float, ...]] = []  # ready, backward, whole, made
        self._grad_ready: dict[Tensor, Any] = {}
        self._start = self._backward_end = self.backend.record_time()
        with player.requiring_grad():  # a hook on a frozen tensor is refused
            parameters = player.flat.parameters if use_hooks else ()
            self._hooks = [p.register_post_accumulate_grad_hook(self._on_grad_ready) for p in parameters]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_grad_ready(self, p: Tensor) -> None:
        self._grad_ready[p] = self.backend.record_time()

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield ALL_RECEIVED
        self._backward_end = self.backend.record_time()

    def traffic(self, n: int) -> Traffic:
        return Traffic()

    def time_turn(self, action: Callable[[], object]) -> None:
        """Note a turn that `action` plays."""
        self._grad_ready = {}
        self._start = self.backend.record_time()
        action()
        end = self.backend.record_time()
        self.backend.synchronize(self.device)
        times = [self.backend.elapsed_s(self._start, moment) for moment in (self._backward_end, end)]
        self.turn_times.append((*self._parts_ready_s(times[0]), *times, self.generator_timer.pop_seconds()))

    def _parts_ready_s(self, backward_s: float) -> list[float]:
        """When each of PARTS equal parts of the vector was filled, and all before it: they leave in this order."""
        flat = self.player.flat
        moments = [self._grad_ready.get(p) for p in flat.parameters]
        times = [backward_s if m is None else self.backend.elapsed_s(self._start, m) for m in moments]
        filled = [*itertools.accumulate(times, max)]
        starts, total = [start for start, _ in flat.slices], len(flat.params)
        last = [
            sum(start < total * part / NUM_READY_PARTS for start in starts) - 1
            for part in range(1, NUM_READY_PARTS + 1)
        ]
        return [filled[i] for i in last]


@dataclass(frozen=True)
class StepKind:
    """Steps that are computed alike: one that stands for them, and their share of all."""

    step: int
    share: float


def step_kinds(objective: object) -> list[StepKind]:
    """The kinds of steps that an objective of ours has: with its lazy penalties and without."""
    if not isinstance(objective, Adversarial):
        return [StepKind(1, 1.0)]
    period = math.lcm(objective.r1_every, objective.r2_every)
    kinds = [objective.penalties_due(step) for step in range(period)]
    return [StepKind(kinds.index(kind), count / period) for kind, count in Counter(kinds).items()]


@dataclass(frozen=True)
class RoundTimes:
    """What a round takes: a turn of each player, and seconds that data are waited for."""

    g: TurnProfile
    d: TurnProfile
    data_wait_s: float


@dataclass
class RoundSamples:
    """Rounds of one batch that were timed: turns by kind of step and player, and waiting for data."""

    batch: int
    step_kinds: list[StepKind]
    turn_times: dict[tuple[int, str], list[tuple[float, ...]]] = dataclasses.field(default_factory=dict)
    data_waits_s: list[float] = dataclasses.field(default_factory=list)

    def medians(self) -> RoundTimes:
        return RoundTimes(self._median_turn("G"), self._median_turn("D"), statistics.median(self.data_waits_s))

    def _median_turn(self, name: str) -> TurnProfile:
        medians = [map(statistics.median, zip(*self.turn_times[kind.step, name])) for kind in self.step_kinds]
        shares = [kind.share for kind in self.step_kinds]
        *ready, backward, whole, made = (weighted_sum(column, shares) for column in zip(*medians))
        return TurnProfile(self.batch, tuple(itertools.accumulate(ready, max)), backward, whole, made)


def time_rounds(session: Session, seconds: float, samples: RoundSamples) -> None:
    """Play rounds of every kind for about so long. The session's clock goes on, but for its step."""
    game, recorded = session.game, session.run.device.capture_passes
    making = GeneratorTimer(game.g, use_hooks=not recorded and not session.run.device.compile)
    timed = {player.name: TimingExchange(player, making, use_hooks=not recorded) for player in game.players}
    role = make_lockstep_role(
        game, SingleRankGroup(), session.role.share, lambda player: timed[player.name], alternating
    )
    session = dataclasses.replace(session, role=role)
    try:
        for kind in samples.step_kinds:
            samples.data_waits_s += _time_step_rounds(session, timed, kind.step, seconds / len(samples.step_kinds))
            for name, one in timed.items():
                samples.turn_times.setdefault((kind.step, name), []).extend(one.turn_times)
    finally:
        for one in (making, *timed.values()):
            one.close()


def _time_step_rounds(
    session: Session, exchanges: Mapping[str, TimingExchange], step: int, seconds: float
) -> list[float]:
    """Play rounds that are all of one step; what each that counts waited for data."""
    waits, deadline = list[float](), math.inf
    while len(waits) < WARM_UP_ROUNDS + MIN_TIMED_ROUNDS or (
        len(waits) < WARM_UP_ROUNDS + MAX_TIMED_ROUNDS and time.perf_counter() < deadline
    ):
        if len(waits) == WARM_UP_ROUNDS:
            deadline = time.perf_counter() + seconds
            for one in exchanges.values():
                one.turn_times.clear()
        session.clock.step = step
        waits.append(_time_round(session, exchanges))
    return waits[WARM_UP_ROUNDS:]


def weighted_sum(values: Sequence[float], weights: Sequence[float]) -> float:
    return sum(value * share for value, share in zip(values, weights, strict=True))


def _time_round(session: Session, exchanges: Mapping[str, TimingExchange]) -> float:
    """A round as train/loop.py plays it; seconds that it waited for data."""
    s, run, waited = session, session.run, 0.0
    start_exchanges(s.role.round, s.clock.step)
    for beat in s.role.round:
        (turn,) = beat
        if turn.needs_new_reals:
            start = time.perf_counter()
            s.lanes.next_micro_batches()
            waited += time.perf_counter() - start
        exchanges[turn.player.name].time_turn(
            lambda: play_turns(
                beat, s.lanes.micro_batches, s.clock.step, s.clock.images + run.round_images, run.round_images
            )
        )
    s.clock.advance(run.round_images)
    return waited
