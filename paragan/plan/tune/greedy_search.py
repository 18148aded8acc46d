"""Which switches pay: tried in turns on this worker, one after another, then against each other. No clock in here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Overrides = Mapping[str, Any]  # dotted field of a run -> its value
MIN_GAIN = 0.02  # what is not this much faster is as it was
MIN_AGREEMENT = 0.75  # of the rounds have to say so
MAX_SWEEPS = 3


@dataclass(frozen=True)
class Option:
    """One decision. choices: what it may set, first what stands; built: it costs time before the first round."""

    name: str
    choices: tuple[Overrides, ...]
    needs_build: bool = False


@dataclass(frozen=True)
class TrialTimes:
    """Seconds of a round, as often as it was timed, and before the first."""

    round_s: Sequence[float]
    startup_s: float = 0.0

    def ratio_to(self, other: TrialTimes) -> float:
        """How long a round takes beside one of `other`, timed in turns with it."""
        return statistics.median(a / b for a, b in zip(self.round_s, other.round_s))


RunTrials = Callable[[Sequence[Overrides]], Sequence[TrialTimes]]  # plays them in turns


@dataclass(frozen=True)
class TuneResult:
    """layout: what every switch sets;  shares: by how much a round is slower without each that left its default;
    total: how many times faster a round is than with all defaults"""

    overrides: Overrides
    slowdown_without: Mapping[str, float]
    speedup: float


def is_faster(new: TrialTimes, old: TrialTimes, rounds: float = math.inf) -> bool:
    """Beyond noise; and so much that `rounds` rounds pay what it takes before the first."""
    if (
        statistics.mean(a < b for a, b in zip(new.round_s, old.round_s)) < MIN_AGREEMENT
        or new.ratio_to(old) > 1 - MIN_GAIN
    ):
        return False
    saved = statistics.median(old.round_s) - statistics.median(new.round_s)
    return saved * rounds > new.startup_s - old.startup_s


def tune_greedily(options: Sequence[Option], run_trials: RunTrials, rounds: float = math.inf) -> TuneResult:
    """Sweep over the switches until none changes, and drop those that are worth nothing beside the others; then try on
    top of them, once, what has to be built. All are dropped where they are not faster than the defaults. rounds: of the
    run, which have to pay for what is built."""
    standing = [switch.choices[0] for switch in options]
    chosen = list(standing)
    light, built = ([i for i, switch in enumerate(options) if switch.needs_build is wanted] for wanted in (False, True))
    for _ in range(MAX_SWEEPS):
        before = list(chosen)
        for i in light:
            chosen[i] = _best_choice(i, options[i], chosen, run_trials, rounds)
        if chosen == before:
            break
    worth = _slowdown_without(light, chosen, standing, run_trials)
    for i, share in worth.items():
        if share <= 1 + MIN_GAIN:
            chosen[i] = standing[i]
    for i in built:
        chosen[i] = _best_choice(i, options[i], chosen, run_trials, rounds)
    worth |= _slowdown_without(built, chosen, standing, run_trials)
    kept = [i for i, choice in enumerate(chosen) if choice != standing[i]]
    if kept:
        now, before = run_trials([_merge_overrides(chosen), _merge_overrides(standing)])
        if is_faster(now, before, rounds):
            return TuneResult(_merge_overrides(chosen), {options[i].name: worth[i] for i in kept}, before.ratio_to(now))
    return TuneResult(_merge_overrides(standing), {}, 1.0)


def _slowdown_without(
    indices: Sequence[int], chosen: list[Overrides], defaults: list[Overrides], run_trials: RunTrials
) -> dict[int, float]:
    """How long a round takes without each of these switches that left its default, over what it takes with all."""
    changed = [i for i in indices if chosen[i] != defaults[i]]
    if not changed:
        return {}
    now, *without = run_trials(
        [_merge_overrides(chosen), *(_merge_overrides([*chosen[:i], defaults[i], *chosen[i + 1 :]]) for i in changed)]
    )
    return {i: other.ratio_to(now) for i, other in zip(changed, without)}


def _best_choice(i: int, option: Option, chosen: list[Overrides], run_trials: RunTrials, rounds: float) -> Overrides:
    """The choice of one switch, the others being as they are."""
    here = chosen[i]
    others = [choice for choice in option.choices if choice != here]
    now, *timed = run_trials([_merge_overrides([*chosen[:i], choice, *chosen[i + 1 :]]) for choice in (here, *others)])
    best = min(range(len(others)), key=lambda k: timed[k].ratio_to(now))
    return others[best] if is_faster(timed[best], now, rounds) else here


def _merge_overrides(choices: Sequence[Overrides]) -> Overrides:
    return {field: value for choice in choices for field, value in choice.items()}
