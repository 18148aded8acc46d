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

from paragan.comm.bucket import ARRIVED, Bucket, Moment
from paragan.comm.process_group import Solo, Work
from paragan.comm.traffic import Traffic
from paragan.core.devices import kind_of
from paragan.game.player import Player
from paragan.game.turn import alternately, begin, play
from paragan.losses.adversarial import Adversarial
from paragan.plan.profile.profile import PARTS, Turn
from paragan.strategies.base import lockstep
from paragan.train.session import Session

WARM_UP = 1  # rounds of every kind, at every visit
FEWEST, MOST = 2, 40  # that are timed


class Making:
    """What G's forward passes take, in either player's turn."""

    def __init__(self, player: Player, hooks: bool = True):
        net, self.clock, self._begun = player.net, kind_of(player.flat.params.device), list[Any]()
        self._passes: list[tuple[Any, Any]] = []
        self._hooks = [net.register_forward_pre_hook(self._begins), net.register_forward_hook(self._ends)]
        if not hooks:
            self.close()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begins(self, *_: Any) -> None:
        self._begun.append(self.clock.now())

    def _ends(self, *_: Any) -> None:
        self._passes.append((self._begun.pop(), self.clock.now()))

    def seconds(self) -> float:
        """Of all since it was asked last; once all is done."""
        passes, self._passes = self._passes, []
        return sum(self.clock.seconds(*one) for one in passes)


class Timed:
    """An exchange with nobody, which notes when what of its player's turn was done.

    hooks: whether every parameter tells when its gradient is there (where passes are replayed, none does).
    """

    def __init__(self, player: Player, making: Making, hooks: bool = True):
        self.player, self.making, self.device = player, making, player.flat.params.device
        self.clock = kind_of(self.device)
        self.turns: list[tuple[float, ...]] = []  # ready, backward, whole, made
        self._filled: dict[Tensor, Any] = {}
        self._start = self._over = self.clock.now()
        with player.moving():  # a hook on a frozen tensor is refused
            parameters = player.flat.parameters if hooks else ()
            self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, p: Tensor) -> None:
        self._filled[p] = self.clock.now()

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | Moment]:
        yield ARRIVED
        self._over = self.clock.now()

    def traffic(self, n: int) -> Traffic:
        return Traffic()

    def play(self, action: Callable[[], object]) -> None:
        """Note a turn that `action` plays."""
        self._filled = {}
        self._start = self.clock.now()
        action()
        end = self.clock.now()
        self.clock.synchronize(self.device)
        times = [self.clock.seconds(self._start, moment) for moment in (self._over, end)]
        self.turns.append((*self._ready(times[0]), *times, self.making.seconds()))

    def _ready(self, over: float) -> list[float]:
        """When each of PARTS equal parts of the vector was filled, and all before it: they leave in this order."""
        flat = self.player.flat
        moments = [self._filled.get(p) for p in flat.parameters]
        times = [over if m is None else self.clock.seconds(self._start, m) for m in moments]
        filled = [*itertools.accumulate(times, max)]
        starts, total = [start for start, _ in flat.slices], len(flat.params)
        last = [sum(start < total * part / PARTS for start in starts) - 1 for part in range(1, PARTS + 1)]
        return [filled[i] for i in last]


@dataclass(frozen=True)
class Kind:
    """Steps that are computed alike: one that stands for them, and their share of all."""

    step: int
    share: float


def kinds_of(objective: object) -> list[Kind]:
    """The kinds of steps that an objective of ours has: with its lazy penalties and without."""
    if not isinstance(objective, Adversarial):
        return [Kind(1, 1.0)]
    period = math.lcm(objective.r1_every, objective.r2_every)
    kinds = [objective.kind(step) for step in range(period)]
    return [Kind(kinds.index(kind), count / period) for kind, count in Counter(kinds).items()]


@dataclass(frozen=True)
class Rounds:
    """What a round takes: a turn of each player, and seconds that data are waited for."""

    g: Turn
    d: Turn
    wait: float


@dataclass
class Samples:
    """Rounds of one batch that were timed: turns by kind of step and player, and waiting for data."""

    batch: int
    kinds: list[Kind]
    turns: dict[tuple[int, str], list[tuple[float, ...]]] = dataclasses.field(default_factory=dict)
    waits: list[float] = dataclasses.field(default_factory=list)

    def medians(self) -> Rounds:
        return Rounds(self._turn("G"), self._turn("D"), statistics.median(self.waits))

    def _turn(self, name: str) -> Turn:
        medians = [map(statistics.median, zip(*self.turns[kind.step, name])) for kind in self.kinds]
        shares = [kind.share for kind in self.kinds]
        *ready, backward, whole, made = (weighted(column, shares) for column in zip(*medians))
        return Turn(self.batch, tuple(itertools.accumulate(ready, max)), backward, whole, made)


def time_rounds(session: Session, seconds: float, into: Samples) -> None:
    """Play rounds of every kind for about so long. The session's clock goes on, but for its step."""
    game, recorded = session.game, session.run.device.graph
    making = Making(game.g, hooks=not recorded and not session.run.device.compile)
    timed = {player.name: Timed(player, making, hooks=not recorded) for player in game.players}
    role = lockstep(game, Solo(), session.role.share, lambda player: timed[player.name], alternately)
    session = dataclasses.replace(session, role=role)
    try:
        for kind in into.kinds:
            into.waits += _rounds(session, timed, kind.step, seconds / len(into.kinds))
            for name, one in timed.items():
                into.turns.setdefault((kind.step, name), []).extend(one.turns)
    finally:
        for one in (making, *timed.values()):
            one.close()


def _rounds(session: Session, timed: Mapping[str, Timed], step: int, seconds: float) -> list[float]:
    """Play rounds that are all of one step; what each that counts waited for data."""
    waits, deadline = list[float](), math.inf
    while len(waits) < WARM_UP + FEWEST or (len(waits) < WARM_UP + MOST and time.perf_counter() < deadline):
        if len(waits) == WARM_UP:
            deadline = time.perf_counter() + seconds
            for one in timed.values():
                one.turns.clear()
        session.clock.step = step
        waits.append(_round(session, timed))
    return waits[WARM_UP:]


def weighted(values: Sequence[float], shares: Sequence[float]) -> float:
    return sum(value * share for value, share in zip(values, shares, strict=True))


def _round(session: Session, timed: Mapping[str, Timed]) -> float:
    """A round as train/loop.py plays it; seconds that it waited for data."""
    s, run, waited = session, session.run, 0.0
    begin(s.role.round, s.clock.step)
    for beat in s.role.round:
        (turn,) = beat
        if turn.fresh:
            start = time.perf_counter()
            s.lanes.next()
            waited += time.perf_counter() - start
        timed[turn.player.name].play(
            lambda: play(beat, s.lanes.hands, s.clock.step, s.clock.images + run.round, run.round)  # noqa: B023
        )
    s.clock.advance(run.round)
    return waited
