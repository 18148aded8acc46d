"""Time the turns of both players, and when each part of a gradient is ready, by playing rounds."""

from __future__ import annotations

import dataclasses
import functools
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
from paragan.strategies.base import PlayerExchange, make_lockstep_role
from paragan.train.session import Session

WARM_UP_ROUNDS = 1  # for every kind of step, at every visit
MIN_TIMED_ROUNDS, MAX_TIMED_ROUNDS = 2, 40


class GeneratorTimer:
    """Times G's forward passes, in either player's turn."""

    def __init__(self, player: Player, use_hooks: bool = True):
        self.backend = backend_of(player.flat.params.device)
        self._starts = list[Any]()
        self._intervals: list[tuple[Any, Any]] = []
        self._hooks = [
            player.net.register_forward_pre_hook(self._on_forward_start),
            player.net.register_forward_hook(self._on_forward_end),
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
        """Return the seconds of all passes since the last call. The device must be synchronized."""
        seconds = sum(self.backend.elapsed_s(start, end) for start, end in self._intervals)
        self._intervals = []
        return seconds


class TimingExchange:
    """An exchange without communication that records the times of its player's turns.

    Without `use_hooks`, no parameter reports when its gradient is ready (hooks do not run in replayed passes).
    """

    def __init__(self, player: Player, generator_timer: GeneratorTimer, use_hooks: bool = True):
        self.player = player
        self.generator_timer = generator_timer
        self.device = player.flat.params.device
        self.backend = backend_of(self.device)
        self.turn_times: list[tuple[float, ...]] = []  # parts ready..., backward, total, G's forward passes
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

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return Traffic()

    def time_turn(self, action: Callable[[], object]) -> None:
        """Record the times of a turn that `action` plays."""
        self._grad_ready = {}
        self._start = self.backend.record_time()
        action()
        end = self.backend.record_time()
        self.backend.synchronize(self.device)
        times = [self.backend.elapsed_s(self._start, moment) for moment in (self._backward_end, end)]
        self.turn_times.append((*self._parts_ready_s(times[0]), *times, self.generator_timer.pop_seconds()))

    def _parts_ready_s(self, backward_s: float) -> list[float]:
        """Return when each of NUM_READY_PARTS equal parts of the flat vector, and all before it, was ready.

        Buckets are sent in this order.
        """
        flat = self.player.flat
        moments = [self._grad_ready.get(p) for p in flat.parameters]
        times = [backward_s if m is None else self.backend.elapsed_s(self._start, m) for m in moments]
        ready = [*itertools.accumulate(times, max)]
        starts = [start for start, _ in flat.slices]
        parts: list[float] = []
        for part in range(1, NUM_READY_PARTS + 1):
            end = len(flat.params) * part / NUM_READY_PARTS
            last_parameter = sum(start < end for start in starts) - 1
            parts.append(ready[last_parameter])
        return parts


@dataclass(frozen=True)
class StepKind:
    """Steps that do the same work."""

    step: int  # one of them
    share: float  # of all steps


def step_kinds(objective: object) -> list[StepKind]:
    """Return the kinds of steps of an objective: with each combination of its lazy penalties, and without."""
    if not isinstance(objective, Adversarial):
        return [StepKind(1, 1.0)]
    period = math.lcm(objective.r1_every, objective.r2_every, objective.path_length_every)
    kinds = [objective.penalties_due(step) for step in range(period)]
    return [StepKind(kinds.index(kind), count / period) for kind, count in Counter(kinds).items()]


@dataclass(frozen=True)
class RoundTimes:
    """Times of a round: one turn of each player, and the seconds that it waits for data."""

    g: TurnProfile
    d: TurnProfile
    data_wait_s: float


@dataclass
class RoundSamples:
    """Timed rounds with one batch: times of turns by step and player, and waiting for data."""

    batch: int
    step_kinds: list[StepKind]
    turn_times: dict[tuple[int, str], list[tuple[float, ...]]] = dataclasses.field(default_factory=dict)
    data_waits_s: list[float] = dataclasses.field(default_factory=list)

    def medians(self) -> RoundTimes:
        """Return medians over rounds, averaged over the kinds of steps."""
        return RoundTimes(self._median_turn("G"), self._median_turn("D"), statistics.median(self.data_waits_s))

    def _median_turn(self, name: str) -> TurnProfile:
        medians = [map(statistics.median, zip(*self.turn_times[kind.step, name])) for kind in self.step_kinds]
        shares = [kind.share for kind in self.step_kinds]
        *ready, backward_s, total_s, g_forward_s = (weighted_sum(column, shares) for column in zip(*medians))
        return TurnProfile(self.batch, tuple(itertools.accumulate(ready, max)), backward_s, total_s, g_forward_s)


def time_rounds(session: Session, seconds: float, samples: RoundSamples) -> None:
    """Play rounds with every kind of step for about `seconds` and add their times to `samples`.

    The session's clock counts their images, but not their steps.
    """
    game = session.game
    device = session.run.device
    generator_timer = GeneratorTimer(game.g, use_hooks=not device.capture_passes and not device.compile)
    exchanges = {
        player.name: TimingExchange(player, generator_timer, use_hooks=not device.capture_passes)
        for player in game.players
    }
    share = session.role.share
    g, d = (PlayerExchange(exchanges[name], SingleRankGroup(), share.weight) for name in "GD")
    role = make_lockstep_role(game, share, (g, d), alternating)
    session = dataclasses.replace(session, role=role)
    try:
        for kind in samples.step_kinds:
            samples.data_waits_s += _time_step_rounds(session, exchanges, kind.step, seconds / len(samples.step_kinds))
            for name, exchange in exchanges.items():
                samples.turn_times.setdefault((kind.step, name), []).extend(exchange.turn_times)
    finally:
        generator_timer.close()
        for exchange in exchanges.values():
            exchange.close()


def _time_step_rounds(
    session: Session, exchanges: Mapping[str, TimingExchange], step: int, seconds: float
) -> list[float]:
    """Play rounds with the number of one step. Returns how long each timed round waited for data."""
    waits = list[float]()
    deadline = math.inf
    while len(waits) < WARM_UP_ROUNDS + MIN_TIMED_ROUNDS or (
        len(waits) < WARM_UP_ROUNDS + MAX_TIMED_ROUNDS and time.perf_counter() < deadline
    ):
        if len(waits) == WARM_UP_ROUNDS:
            deadline = time.perf_counter() + seconds
            for exchange in exchanges.values():
                exchange.turn_times.clear()
        session.clock.step = step
        waits.append(_time_round(session, exchanges))
    return waits[WARM_UP_ROUNDS:]


def weighted_sum(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the sum of values times weights."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def _time_round(session: Session, exchanges: Mapping[str, TimingExchange]) -> float:
    """Play a round as train/loop.py does. Returns the seconds that it waited for data."""
    lanes = session.lanes
    step = session.clock.step
    round_images = session.run.round_images
    next_images = session.clock.images + round_images
    waited_s = 0.0
    start_exchanges(session.role.round, step)
    for group in session.role.round:
        (turn,) = group
        if turn.needs_new_reals:
            start = time.perf_counter()
            lanes.next_micro_batches()
            waited_s += time.perf_counter() - start
        play = functools.partial(play_turns, group, lanes.micro_batches, step, next_images, round_images)
        exchanges[turn.player.name].time_turn(play)
    session.clock.advance(round_images)
    return waited_s
