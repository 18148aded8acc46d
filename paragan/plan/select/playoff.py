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
from paragan.core.devices import backend_of
from paragan.plan.select.candidates import SEMANTICS_PENALTY
from paragan.plan.select.compare import Choice, Plan
from paragan.train.loop import play_round
from paragan.train.session import Session

SHORTLIST_MARGIN = 0.15  # of the first's time: what a plan may be wrong by
MAX_SHORTLIST = 5  # that play
NUM_BLOCKS, BLOCK_S = 5, 0.4  # of each, at least so long
MIN_DIFFERENCE = 0.02  # of the time: less is not told apart by so few rounds


@dataclass
class Contestant:
    """One strategy, which plays some rounds when it is its turn."""

    session: Session
    block_s: float = BLOCK_S
    round_s: list[float] = field(default_factory=list[float])  # of a round of the slowest rank, block by block
    _rounds_per_block: int = 0  # rounds

    def play_block(self) -> None:
        """A block; before the first some rounds that do not count. Every rank calls this."""
        if not self._rounds_per_block:
            period = self.session.run.strategy.traffic_period
            self._time_rounds(2 * period)
            took = self._time_rounds(2 * period) / 2
            self._rounds_per_block = period * max(1, round(self.block_s / took))
        self.round_s.append(self._time_rounds(self._rounds_per_block) / self._rounds_per_block)

    def _time_rounds(self, count: int) -> float:
        world, role = self.session.world, self.session.role
        world.all_gather_str("begin")
        start = time.perf_counter()
        for _ in range(count):
            play_round(self.session)
        backend_of(world.device).synchronize(world.device)
        seconds = time.perf_counter() - start
        if role.drain:
            role.drain()
        return max(map(float, world.all_gather_str(repr(seconds))))


def shortlist(plan: Plan, seconds: float) -> list[Choice]:
    """The first of a plan, and those who are near and have nothing against them: as many as fit into the memory beside
    each other, and into about so many seconds."""
    first, chosen = plan.best, list[Choice]()
    taken = needed = 0.0
    for row in plan.rows:
        near = row.fits_memory and not row.limits and row.hours <= (1 + SHORTLIST_MARGIN) * first.hours
        step_s, period = row.prediction.step_s, row.candidate.strategy.traffic_period
        takes = (4 * period + NUM_BLOCKS * period) * step_s + NUM_BLOCKS * BLOCK_S
        needs = row.prediction.memory_bytes
        if not near or (plan.goal.memory_bytes and needed + needs > plan.goal.memory_bytes) or taken + takes > seconds:
            continue
        chosen, taken, needed = [*chosen, row], taken + takes, needed + needs
    return chosen[:MAX_SHORTLIST] if first in chosen[:MAX_SHORTLIST] else [first]


def time_contestants(names: Sequence[str], make_session: Callable[[str], Session], world: World) -> dict[str, float]:
    """Seconds of a round of each, the same on every rank. All take turns in blocks: of the first it is the median over
    them, of another that times the median of its part of the first's in the same block, since no machine is always as
    fast."""
    players = dict[str, Contestant]()
    with contextlib.ExitStack() as stack:
        for name in names:
            players[name] = Contestant(make_session(name))
            stack.callback(players[name].session.lanes.close)
        for block in range(NUM_BLOCKS):
            for i in range(len(names)):
                players[names[(block + i) % len(names)]].play_block()
        world.all_gather_str("played")
    first = players[names[0]].round_s
    ratios = {name: [a / b for a, b in zip(player.round_s, first, strict=True)] for name, player in players.items()}
    return {name: statistics.median(first) * statistics.median(found) for name, found in ratios.items()}


def select_winner(plan: Plan, seconds: Mapping[str, float]) -> Choice:
    """The plan's first, unless another is faster for certain, and what it gives up is worth it."""

    def penalized_s(row: Choice) -> float:
        return seconds[row.name] * (1 + plan.goal.margin * SEMANTICS_PENALTY[row.semantics])

    best = min((row for row in plan.rows if row.name in seconds), key=penalized_s)
    return best if penalized_s(best) < (1 - MIN_DIFFERENCE) * penalized_s(plan.best) else plan.best


def describe_result(plan: Plan, seconds: Mapping[str, float]) -> list[str]:
    """How it ended: the winner, and each of the others."""
    first, fastest = select_winner(plan, seconds), min(seconds.values())
    behind = seconds[first.name] / fastest - 1
    how = f"{behind:.1%} behind the fastest" if behind else "the fastest"
    why = plan.best.reason if first == plan.best else f"the plan had {plan.best.name} first"
    rows = [f"{first.name}: {_format_ms(seconds[first.name])}, {how} of {len(seconds)} that played here; {why}"]
    for row in sorted((row for row in plan.rows if row.name in seconds), key=lambda row: seconds[row.name]):
        faster = seconds[row.name] < seconds[first.name]
        gives_up = SEMANTICS_PENALTY[row.semantics] > SEMANTICS_PENALTY[first.semantics]
        but = f": too little for what is {row.semantics} (strategy.margin)" if gives_up else ": hardly a difference"
        but *= faster
        rows += [f"not {row.name}: {_format_ms(seconds[row.name])}, as it played here{but}"] if row != first else []
    return rows


def _format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms a round"
