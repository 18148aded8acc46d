"""The final: those that a plan finds about as fast play rounds in turn, on the ranks there are, and the clock decides.

A plan does not see what ranks and their links do to each other's cores, and cannot rank what is so near. Whoever gives
something up has to be faster for it here too, by its part of the margin.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paragan.comm.world import World
from paragan.core.devices import kind_of
from paragan.plan.select.candidates import GIVES_UP
from paragan.plan.select.compare import Choice, Plan
from paragan.train.loop import play_round
from paragan.train.session import Session

NEAR = 0.15  # of the first's time: what a plan may be wrong by
MOST = 5  # that play
BLOCKS, BLOCK_S = 5, 0.4  # of each, at least so long
TELLS = 0.02  # of the time: less is not told apart by so few rounds


@dataclass
class Player:
    """One strategy, which plays some rounds when it is its turn."""

    session: Session
    block_s: float = BLOCK_S
    times: list[float] = field(default_factory=list[float])  # of a round of the slowest rank, block by block
    _each: int = 0  # rounds

    def play(self) -> None:
        """A block; before the first some rounds that do not count. Every rank calls this."""
        if not self._each:
            period = _period(self.session.run.strategy)
            self._rounds(2 * period)
            took = self._rounds(2 * period) / 2
            self._each = period * max(1, round(self.block_s / took))
        self.times.append(self._rounds(self._each) / self._each)

    def _rounds(self, count: int) -> float:
        world, role = self.session.world, self.session.role
        world.agree("begin")
        start = time.perf_counter()
        for _ in range(count):
            play_round(self.session)
        kind_of(world.device).synchronize(world.device)
        seconds = time.perf_counter() - start
        if role.settle:
            role.settle()
        return max(map(float, world.agree(repr(seconds))))


def _period(strategy: object) -> int:
    """Rounds after which it does the same again."""
    return max(int(getattr(strategy, name, 1)) for name in ("every", "snapshot_every", "local_steps"))


def finalists(plan: Plan, seconds: float) -> list[Choice]:
    """The first of a plan, and those who are near and have nothing against them: as many as fit into the memory beside
    each other, and into about so many seconds."""
    first, chosen = plan.first, list[Choice]()
    taken = needed = 0.0
    for row in plan.rows:
        near = row.fits and not row.limits and row.hours <= (1 + NEAR) * first.hours
        step_s, period = row.prediction.step_s, _period(row.candidate.strategy)
        takes = (4 * period + BLOCKS * period) * step_s + BLOCKS * BLOCK_S
        needs = row.prediction.memory_bytes
        if not near or (plan.goal.memory and needed + needs > plan.goal.memory) or taken + takes > seconds:
            continue
        chosen, taken, needed = [*chosen, row], taken + takes, needed + needs
    return chosen[:MOST] if first in chosen[:MOST] else [first]


def played(names: Sequence[str], begun: Callable[[str], Session], world: World) -> dict[str, float]:
    """Seconds of a round of each, the same on every rank. All take turns in blocks: of the first it is the median over
    them, of another that times the median of its part of the first's in the same block, since no machine is always as
    fast."""
    players = dict[str, Player]()
    with contextlib.ExitStack() as stack:
        for name in names:
            players[name] = Player(begun(name))
            stack.callback(players[name].session.lanes.close)
        for block in range(BLOCKS):
            for i in range(len(names)):
                players[names[(block + i) % len(names)]].play()
        world.agree("played")
    first = players[names[0]].times
    ratios = {name: [a / b for a, b in zip(player.times, first, strict=True)] for name, player in players.items()}
    return {name: statistics.median(first) * statistics.median(found) for name, found in ratios.items()}


def winner(plan: Plan, seconds: Mapping[str, float]) -> Choice:
    """The plan's first, unless another is faster for certain, and what it gives up is worth it."""

    def weighed(row: Choice) -> float:
        return seconds[row.name] * (1 + plan.goal.margin * GIVES_UP[row.promise])

    best = min((row for row in plan.rows if row.name in seconds), key=weighed)
    return best if weighed(best) < (1 - TELLS) * weighed(plan.first) else plan.first


def told(plan: Plan, seconds: Mapping[str, float]) -> list[str]:
    """How it ended: the winner, and each of the others."""
    first, fastest = winner(plan, seconds), min(seconds.values())
    behind = seconds[first.name] / fastest - 1
    how = f"{behind:.1%} behind the fastest" if behind else "the fastest"
    why = plan.first.why if first == plan.first else f"the plan had {plan.first.name} first"
    rows = [f"{first.name}: {_ms(seconds[first.name])}, {how} of {len(seconds)} that played here; {why}"]
    for row in sorted((row for row in plan.rows if row.name in seconds), key=lambda row: seconds[row.name]):
        faster = seconds[row.name] < seconds[first.name]
        gives_up = GIVES_UP[row.promise] > GIVES_UP[first.promise]
        but = f": too little for what is {row.promise} (strategy.margin)" if gives_up else ": hardly a difference"
        but *= faster
        rows += [f"not {row.name}: {_ms(seconds[row.name])}, as it played here{but}"] if row != first else []
    return rows


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms a round"
