"""Greedy search for the fastest settings, one option after another. Timing is a function that the caller passes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Overrides = Mapping[str, Any]  # dotted field of a run -> its value
MIN_GAIN = 0.02  # a smaller gain does not count
MIN_AGREEMENT = 0.75  # fraction of the rounds that must be faster
MAX_SWEEPS = 3


@dataclass(frozen=True)
class Option:
    """One decision."""

    name: str
    choices: tuple[Overrides, ...]  # the current one first
    needs_build: bool = False  # it takes time before the first round


@dataclass(frozen=True)
class TrialTimes:
    """Times of one set of overrides."""

    round_s: Sequence[float]  # seconds of each timed round
    startup_s: float = 0.0  # seconds before the first round

    def ratio_to(self, other: TrialTimes) -> float:
        """Return the median ratio of a round to one of `other` that was timed next to it."""
        return statistics.median(a / b for a, b in zip(self.round_s, other.round_s))


RunTrials = Callable[[Sequence[Overrides]], Sequence[TrialTimes]]  # times them in turns


@dataclass(frozen=True)
class TuneResult:
    """Result of a search."""

    overrides: Overrides  # of all options
    slowdown_without: Mapping[str, float]  # by changed option: factor on the time of a round without it
    speedup: float  # of all changes together


def is_faster(new: TrialTimes, old: TrialTimes, rounds: float = math.inf) -> bool:
    """Return whether `new` is faster beyond noise, and saves more time in `rounds` rounds than its startup takes."""
    agreement = statistics.mean(a < b for a, b in zip(new.round_s, old.round_s))
    if agreement < MIN_AGREEMENT or new.ratio_to(old) > 1 - MIN_GAIN:
        return False
    saved_s = statistics.median(old.round_s) - statistics.median(new.round_s)
    return saved_s * rounds > new.startup_s - old.startup_s


def tune_greedily(options: Sequence[Option], run_trials: RunTrials, rounds: float = math.inf) -> TuneResult:
    """Search for the fastest choice of every option.

    Sweep over the options until none changes, and revert those without a gain next to the others. Then try the options
    that need a build once, on top of the others. Revert everything if it is not faster than the current settings.

    Args:
        options: to decide.
        run_trials: times several sets of overrides in turns.
        rounds: of the run, which must make up for the time of a build.
    """
    current = [option.choices[0] for option in options]
    chosen = list(current)
    cheap = [i for i, option in enumerate(options) if not option.needs_build]
    built = [i for i, option in enumerate(options) if option.needs_build]
    for _ in range(MAX_SWEEPS):
        before = list(chosen)
        for i in cheap:
            chosen[i] = _best_choice(i, options[i], chosen, run_trials, rounds)
        if chosen == before:
            break
    slowdowns = _slowdown_without(cheap, chosen, current, run_trials)
    for i, slowdown in slowdowns.items():
        if slowdown <= 1 + MIN_GAIN:
            chosen[i] = current[i]
    for i in built:
        chosen[i] = _best_choice(i, options[i], chosen, run_trials, rounds)
    slowdowns |= _slowdown_without(built, chosen, current, run_trials)
    changed = [i for i, choice in enumerate(chosen) if choice != current[i]]
    if changed:
        new, old = run_trials([_merge_overrides(chosen), _merge_overrides(current)])
        if is_faster(new, old, rounds):
            slowdown_without = {options[i].name: slowdowns[i] for i in changed}
            return TuneResult(_merge_overrides(chosen), slowdown_without, old.ratio_to(new))
    return TuneResult(_merge_overrides(current), {}, 1.0)


def _slowdown_without(
    indices: Sequence[int], settings: list[Overrides], current: list[Overrides], run_trials: RunTrials
) -> dict[int, float]:
    """Return for each changed option of `indices` the time of a round without the change, over that with all."""
    changed = [i for i in indices if settings[i] != current[i]]
    if not changed:
        return {}
    without = [_merge_overrides([*settings[:i], current[i], *settings[i + 1 :]]) for i in changed]
    all_times, *times_without = run_trials([_merge_overrides(settings), *without])
    return {i: times.ratio_to(all_times) for i, times in zip(changed, times_without)}


def _best_choice(i: int, option: Option, settings: list[Overrides], run_trials: RunTrials, rounds: float) -> Overrides:
    """Return the best choice of one option; the others stay as they are."""
    present = settings[i]
    others = [choice for choice in option.choices if choice != present]
    trials = [_merge_overrides([*settings[:i], choice, *settings[i + 1 :]]) for choice in (present, *others)]
    present_times, *other_times = run_trials(trials)
    best = min(range(len(others)), key=lambda k: other_times[k].ratio_to(present_times))
    return others[best] if is_faster(other_times[best], present_times, rounds) else present


def _merge_overrides(choices: Sequence[Overrides]) -> Overrides:
    return {field: value for choice in choices for field, value in choice.items()}
