"""What a run has spent and how its ranks stood to each other, from its stats: time, bytes, ages, distances."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paragan.report.number_format import format_bytes
from paragan.report.run_data import StatsColumns

AGE_KEY = re.compile(r"Async/(.+)_age/(\d{1,9})")
MAX_AGE_BARS = 16  # ages that have a bar of their own


@dataclass(frozen=True)
class BreakdownItem:
    """A part of a whole."""

    name: str
    colour: str
    amount: float
    fraction: float  # of the whole, 0 to 1


@dataclass(frozen=True)
class AgeHistogram:
    """How old, in rounds, was what a player saw."""

    name: str
    mean_rounds: float
    bars: tuple[BreakdownItem, ...]


@dataclass(frozen=True)
class SentTraffic:
    """What the rank that sent most has sent for a player, in all."""

    player: str
    total_bytes: float
    bytes_per_image: float  # shown to D

    @property
    def total_text(self) -> str:
        return format_bytes(self.total_bytes)


def time_breakdown(stats: StatsColumns) -> list[BreakdownItem]:
    """The run's seconds by what they went into; nothing where no time was recorded.

    `Timing/total_s` is the whole; it may start again at 0 where a run was resumed. The waits are those of
    each tick. A trainer whose ticks leave out scores, samples and checkpoints spends time between them, of which
    `Timing/eval_s` were scores.
    """
    total = total_elapsed(stats.finite_values("Timing/total_s"))
    kimg, pace = stats.column("Timing/sec_per_kimg")
    steps = [max(now - before, 0) for before, now in zip([0.0, *kimg], kimg)]
    ticks = sum(step * seconds for step, seconds in zip(steps, pace) if math.isfinite(seconds)) or total
    data = min(sum(stats.finite_values("Timing/data_wait_s")), ticks)
    exchange = min(sum(stats.finite_values("Timing/exchange_wait_s")), ticks - data)
    between = max(total - ticks, 0)
    scores = min(sum(stats.finite_values("Timing/eval_s")), between)
    left = "between ticks (samples, checkpoints)" if scores else "between ticks (scores, samples, checkpoints)"
    parts = {
        "computing and the rest": ("g", ticks - data - exchange),
        "waiting for data": ("d", data),
        "waiting for other ranks": ("real", exchange),
        "evaluation": ("r6", scores),
        left: ("other", between - scores),
    }
    whole = sum(seconds for _, seconds in parts.values())
    if not whole:
        return []
    return [BreakdownItem(name, colour, spent, spent / whole) for name, (colour, spent) in parts.items() if spent]


def total_elapsed(elapsed_s: Sequence[float]) -> float:
    """What a clock that may have been set back to zero has counted in all."""
    return sum(now - before if now >= before else now for before, now in zip([0.0, *elapsed_s], elapsed_s))


def sent_traffic(stats: StatsColumns) -> list[SentTraffic]:
    """By player; nothing where nothing was sent."""
    images = 1000 * max(stats.finite_values("Progress/kimg"), default=0.0)
    found = []
    for key in stats.keys:
        if match := re.fullmatch(r"Comm/(.+)/sent_bytes", key):
            total = sum(stats.finite_values(key))
            found += [SentTraffic(match[1], total, total / images if images else math.nan)] if total else []
    return found


def age_histograms(stats: StatsColumns) -> list[AgeHistogram]:
    """`Async/fakes_age/3` counts what was seen and was 3 rounds old: of each kind, how much was how old."""
    counts: dict[str, dict[int, float]] = {}
    for key in stats.keys:
        if match := AGE_KEY.fullmatch(key):
            counts.setdefault(match[1], {})[int(match[2])] = sum(stats.finite_values(key))
    return [_age_histogram(name, found) for name, found in counts.items() if sum(found.values()) > 0]


def mean_ages(stats: StatsColumns) -> dict[str, tuple[list[float], list[float]]]:
    """Tick by tick: of each kind `(kimg, mean age)`."""
    summed: dict[str, dict[float, list[float]]] = {}
    for key in stats.keys:
        if match := AGE_KEY.fullmatch(key):
            at = summed.setdefault(match[1], {})
            for kimg, count in zip(*stats.column(key)):
                total = at.setdefault(kimg, [0.0, 0.0])
                total[0] += count
                total[1] += count * int(match[2])
    return {
        name: (sorted(at), [at[kimg][1] / at[kimg][0] if at[kimg][0] else math.nan for kimg in sorted(at)])
        for name, at in summed.items()
    }


def _age_histogram(name: str, counts: dict[int, float]) -> AgeHistogram:
    whole = sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / whole
    older = sum(count for age, count in counts.items() if age > MAX_AGE_BARS)
    bars = [(_format_age(age), count) for age, count in sorted(counts.items()) if age <= MAX_AGE_BARS]
    bars += [(f"more than {MAX_AGE_BARS} rounds", older)] if older else []
    return AgeHistogram(name, mean, tuple(BreakdownItem(told, "g", count, count / whole) for told, count in bars))


def _format_age(age: int) -> str:
    return {0: "this round", 1: "1 round"}.get(age, f"{age} rounds")
