"""What a run has used, from its statistics: time, traffic, and the staleness of what players trained on."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paragan.report.number_format import format_bytes
from paragan.report.run_data import StatsColumns

AGE_KEY = re.compile(r"Async/(.+)_age/(\d{1,9})")
MAX_AGE_BARS = 16  # older ones share one bar


@dataclass(frozen=True)
class BreakdownItem:
    """A part of a whole."""

    name: str
    colour: str
    amount: float
    fraction: float  # of the whole, 0 to 1


@dataclass(frozen=True)
class AgeHistogram:
    """Histogram of ages, in rounds, of one kind of stale data (fakes, a critic)."""

    name: str
    mean_rounds: float
    bars: tuple[BreakdownItem, ...]


@dataclass(frozen=True)
class SentTraffic:
    """Traffic for a player, of the rank that sent the most."""

    player: str
    total_bytes: float
    bytes_per_image: float  # per real image shown to D

    @property
    def total_text(self) -> str:
        return format_bytes(self.total_bytes)


def time_breakdown(stats: StatsColumns) -> list[BreakdownItem]:
    """Split the time of a run, in seconds, by what it was used for; [] if no time was recorded.

    `Timing/total_s` is the total; it may restart at 0 when a run is resumed. Waiting times are recorded per tick.
    Scores, samples and checkpoints are computed between ticks; `Timing/eval_s` is the part for scores.
    """
    total = total_elapsed(stats.finite_values("Timing/total_s"))
    kimg, pace = stats.column("Timing/sec_per_kimg")
    steps = [max(now - before, 0) for before, now in zip([0.0, *kimg], kimg)]
    ticks = sum(step * seconds for step, seconds in zip(steps, pace) if math.isfinite(seconds)) or total
    data = min(sum(stats.finite_values("Timing/data_wait_s")), ticks)
    exchange = min(sum(stats.finite_values("Timing/exchange_wait_s")), ticks - data)
    between = max(total - ticks, 0)
    scores = min(sum(stats.finite_values("Timing/eval_s")), between)
    rest = "between ticks (samples, checkpoints)" if scores else "between ticks (scores, samples, checkpoints)"
    parts = {
        "computing and other": ("g", ticks - data - exchange),
        "waiting for data": ("d", data),
        "waiting for other ranks": ("real", exchange),
        "evaluation": ("r6", scores),
        rest: ("other", between - scores),
    }
    sum_s = sum(seconds for _, seconds in parts.values())
    if not sum_s:
        return []
    return [
        BreakdownItem(name, colour, seconds, seconds / sum_s) for name, (colour, seconds) in parts.items() if seconds
    ]


def total_elapsed(elapsed_s: Sequence[float]) -> float:
    """Return the total of a clock that may have restarted at zero."""
    return sum(now - before if now >= before else now for before, now in zip([0.0, *elapsed_s], elapsed_s))


def sent_traffic(stats: StatsColumns) -> list[SentTraffic]:
    """Return the traffic for each player that had any."""
    images = 1000 * max(stats.finite_values("Progress/kimg"), default=0.0)
    result: list[SentTraffic] = []
    for key in stats.keys:
        if match := re.fullmatch(r"Comm/(.+)/sent_bytes", key):
            total = sum(stats.finite_values(key))
            if total:
                result.append(SentTraffic(match[1], total, total / images if images else math.nan))
    return result


def age_histograms(stats: StatsColumns) -> list[AgeHistogram]:
    """Return a histogram for each kind of stale data. `Async/fakes_age/3` counts fakes that were 3 rounds old."""
    counts: dict[str, dict[int, float]] = {}
    for key in stats.keys:
        if match := AGE_KEY.fullmatch(key):
            counts.setdefault(match[1], {})[int(match[2])] = sum(stats.finite_values(key))
    return [_age_histogram(name, by_age) for name, by_age in counts.items() if sum(by_age.values()) > 0]


def mean_ages(stats: StatsColumns) -> dict[str, tuple[list[float], list[float]]]:
    """Return `(kimg, mean age in rounds)` by tick, for each kind of stale data."""
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
    num_items = sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / num_items
    older = sum(count for age, count in counts.items() if age > MAX_AGE_BARS)
    bars = [(_format_age(age), count) for age, count in sorted(counts.items()) if age <= MAX_AGE_BARS]
    if older:
        bars.append((f"more than {MAX_AGE_BARS} rounds", older))
    items = tuple(BreakdownItem(text, "g", count, count / num_items) for text, count in bars)
    return AgeHistogram(name, mean, items)


def _format_age(age: int) -> str:
    return {0: "this round", 1: "1 round"}.get(age, f"{age} rounds")
