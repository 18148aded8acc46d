"""What a run has spent and how its ranks stood to each other, from its stats: time, bytes, ages, distances."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paragan.report.number_format import size
from paragan.report.run_data import Stats

AGE = re.compile(r"Async/(.+)_age/(\d{1,9})")
OLDEST = 16  # ages that have a bar of their own


@dataclass(frozen=True)
class Share:
    """A part of a whole."""

    name: str
    colour: str
    amount: float
    part: float  # of the whole, 0 to 1


@dataclass(frozen=True)
class Ages:
    """How old, in rounds, was what a player saw."""

    name: str
    mean: float
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Sent:
    """What the rank that sent most has sent for a player, in all."""

    player: str
    bytes: float
    per_image: float  # shown to D

    @property
    def told(self) -> str:
        return size(self.bytes)


def time_spent(stats: Stats) -> list[Share]:
    """The run's seconds by what they went into; nothing where no time was recorded.

    `Timing/total_s` is the whole; it may start again at 0 where a run was resumed. The waits are those of
    each tick. A trainer whose ticks leave out scores, samples and checkpoints spends time between them, of which
    `Timing/eval_s` were scores.
    """
    total = run_up(stats.finite("Timing/total_s"))
    kimg, pace = stats.column("Timing/sec_per_kimg")
    steps = [max(now - before, 0) for before, now in zip([0.0, *kimg], kimg)]
    ticks = sum(step * seconds for step, seconds in zip(steps, pace) if math.isfinite(seconds)) or total
    data = min(sum(stats.finite("Timing/data_wait_s")), ticks)
    exchange = min(sum(stats.finite("Timing/exchange_wait_s")), ticks - data)
    between = max(total - ticks, 0)
    scores = min(sum(stats.finite("Timing/eval_s")), between)
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
    return [Share(name, colour, spent, spent / whole) for name, (colour, spent) in parts.items() if spent]


def run_up(clock: Sequence[float]) -> float:
    """What a clock that may have been set back to zero has counted in all."""
    return sum(now - before if now >= before else now for before, now in zip([0.0, *clock], clock))


def bytes_sent(stats: Stats) -> list[Sent]:
    """By player; nothing where nothing was sent."""
    images = 1000 * max(stats.finite("Progress/kimg"), default=0.0)
    found = []
    for key in stats.keys:
        if match := re.fullmatch(r"Comm/(.+)/sent_bytes", key):
            total = sum(stats.finite(key))
            found += [Sent(match[1], total, total / images if images else math.nan)] if total else []
    return found


def ages(stats: Stats) -> list[Ages]:
    """`Async/fakes_age/3` counts what was seen and was 3 rounds old: of each kind, how much was how old."""
    counts: dict[str, dict[int, float]] = {}
    for key in stats.keys:
        if match := AGE.fullmatch(key):
            counts.setdefault(match[1], {})[int(match[2])] = sum(stats.finite(key))
    return [_ages(name, found) for name, found in counts.items() if sum(found.values()) > 0]


def mean_ages(stats: Stats) -> dict[str, tuple[list[float], list[float]]]:
    """Tick by tick: of each kind `(kimg, mean age)`."""
    summed: dict[str, dict[float, list[float]]] = {}
    for key in stats.keys:
        if match := AGE.fullmatch(key):
            at = summed.setdefault(match[1], {})
            for kimg, count in zip(*stats.column(key)):
                total = at.setdefault(kimg, [0.0, 0.0])
                total[0] += count
                total[1] += count * int(match[2])
    return {
        name: (sorted(at), [at[kimg][1] / at[kimg][0] if at[kimg][0] else math.nan for kimg in sorted(at)])
        for name, at in summed.items()
    }


def _ages(name: str, counts: dict[int, float]) -> Ages:
    whole = sum(counts.values())
    mean = sum(age * count for age, count in counts.items()) / whole
    older = sum(count for age, count in counts.items() if age > OLDEST)
    bars = [(_rounds(age), count) for age, count in sorted(counts.items()) if age <= OLDEST]
    bars += [(f"more than {OLDEST} rounds", older)] if older else []
    return Ages(name, mean, tuple(Share(told, "g", count, count / whole) for told, count in bars))


def _rounds(age: int) -> str:
    return {0: "this round", 1: "1 round"}.get(age, f"{age} rounds")
