"""The playoff: strategies with nearly equal predictions are timed in turns on the real ranks, and the fastest wins.

A prediction does not include how ranks and messages compete for processor cores, so it cannot rank strategies that are
close. Here too, more images count as more time, and a strategy that is not equivalent to one worker must be faster by
the margin.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.plan.select.compare import Choice, Plan
from paragan.plan.select.explain import describe_images_factor
from paragan.train.loop import play_round
from paragan.train.session import Session

SHORTLIST_MARGIN = 0.15  # by how much a prediction may be wrong, as a fraction of the best time
MAX_SHORTLIST = 5
NUM_BLOCKS = 5  # of rounds, for each strategy
BLOCK_S = 0.4  # about how long a block takes
MIN_DIFFERENCE = 0.02  # of the time: a smaller difference is within the noise of so few rounds


@dataclass
class Contestant:
    """One strategy, timed in blocks of rounds."""

    session: Session
    block_s: float = BLOCK_S
    round_s: list[float] = field(default_factory=list[float])  # seconds of a round of the slowest rank, by block
    _rounds_per_block: int = 0

    def play_block(self) -> None:
        """Time a block; before the first one, play some rounds to warm up. All ranks call it together."""
        if not self._rounds_per_block:
            period = self.session.run.strategy.traffic_period
            self._time_rounds(2 * period)
            period_s = self._time_rounds(2 * period) / 2
            self._rounds_per_block = period * max(1, round(self.block_s / period_s))
        self.round_s.append(self._time_rounds(self._rounds_per_block) / self._rounds_per_block)

    def _time_rounds(self, count: int) -> float:
        """Return the seconds of `count` rounds of the slowest rank."""
        world = self.session.world
        role = self.session.role
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
    """Return the rows of a plan that are worth timing.

    These are the best row and those without limits that are nearly as fast, as many as fit into the memory at the same
    time and can be timed in about `seconds`.
    """
    best = plan.best
    chosen = list[Choice]()
    total_s = 0.0
    total_bytes = 0
    for row in plan.rows:
        is_close = row.fits_memory and not row.limits and row.hours <= (1 + SHORTLIST_MARGIN) * best.hours
        period = row.candidate.strategy.traffic_period
        block_s = (4 * period + NUM_BLOCKS * period) * row.prediction.step_s + NUM_BLOCKS * BLOCK_S
        nbytes = row.prediction.memory_bytes
        exceeds_memory = plan.goal.memory_bytes and total_bytes + nbytes > plan.goal.memory_bytes
        if not is_close or exceeds_memory or total_s + block_s > seconds:
            continue
        chosen.append(row)
        total_s += block_s
        total_bytes += nbytes
    chosen = chosen[:MAX_SHORTLIST]
    return chosen if best in chosen else [best]


def time_contestants(names: Sequence[str], make_session: Callable[[str], Session], world: World) -> dict[str, float]:
    """Time some strategies in turns, block by block.

    The speed of a machine changes, so a strategy is compared with the first one in the same block: its time is the
    median of the first one, times the median of its ratio to the first one.

    Args:
        names: of the strategies.
        make_session: builds the session of a strategy.
        world: of all ranks, which call this together.

    Returns:
        Seconds of a round by name, equal on all ranks.
    """
    contestants = dict[str, Contestant]()
    with contextlib.ExitStack() as stack:
        for name in names:
            contestants[name] = Contestant(make_session(name))
            stack.callback(contestants[name].session.lanes.close)
        for block in range(NUM_BLOCKS):
            for i in range(len(names)):
                contestants[names[(block + i) % len(names)]].play_block()
        world.all_gather_str("done")
    first = contestants[names[0]].round_s
    seconds: dict[str, float] = {}
    for name, contestant in contestants.items():
        ratios = [a / b for a, b in zip(contestant.round_s, first, strict=True)]
        seconds[name] = statistics.median(first) * statistics.median(ratios)
    return seconds


def select_winner(plan: Plan, seconds: Mapping[str, float]) -> Choice:
    """Return the best row of the plan, unless another one reaches the goal sooner by more than noise and the margin."""

    def penalized_s(row: Choice) -> float:
        return row.penalize(row.images_factor * seconds[row.name], plan.goal.margin)

    best = min((row for row in plan.rows if row.name in seconds), key=penalized_s)
    return best if penalized_s(best) < (1 - MIN_DIFFERENCE) * penalized_s(plan.best) else plan.best


def describe_result(plan: Plan, seconds: Mapping[str, float]) -> list[str]:
    """Say which strategy won and why, and the time of each of the others."""
    winner = select_winner(plan, seconds)
    winner_s = seconds[winner.name]
    behind = winner_s / min(seconds.values()) - 1
    place = f"{behind:.1%} behind the fastest" if behind else "the fastest"
    reason = plan.best.reason if winner == plan.best else f"predicted to be best was {plan.best.name}"
    lines = [f"{winner.name}: {_format_ms(winner_s)}, {place} of {len(seconds)} timed here; {reason}"]
    timed = [row for row in plan.rows if row.name in seconds and row != winner]
    for row in sorted(timed, key=lambda row: seconds[row.name]):
        line = f"not {row.name}: {_format_ms(seconds[row.name])}, as timed here"
        if seconds[row.name] < winner_s:
            if row.images_factor > winner.images_factor:
                line += f": not enough for {describe_images_factor(row.images_factor)}"
            elif row.semantics != "equivalent" and winner.semantics == "equivalent":
                line += f": not enough for a strategy that is {row.semantics} (strategy.margin)"
            else:
                line += ": the difference is within the noise"
        lines.append(line)
    return lines


def _format_ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms per round"
