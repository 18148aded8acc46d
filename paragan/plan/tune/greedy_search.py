"""Which switches pay: tried in turns on this worker, one after another, then against each other. No clock in here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Layout = Mapping[str, Any]  # dotted field of a run -> its value
NOISE = 0.02  # what is not this much faster is as it was
AGREE = 0.75  # of the rounds have to say so
SWEEPS = 3


@dataclass(frozen=True)
class Switch:
    """One decision. choices: what it may set, first what stands; built: it costs time before the first round."""

    name: str
    choices: tuple[Layout, ...]
    built: bool = False


@dataclass(frozen=True)
class Timed:
    """Seconds of a round, as often as it was timed, and before the first."""

    seconds: Sequence[float]
    start: float = 0.0

    def to(self, other: Timed) -> float:
        """How long a round takes beside one of `other`, timed in turns with it."""
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds))


Trial = Callable[[Sequence[Layout]], Sequence[Timed]]  # plays them in turns


@dataclass(frozen=True)
class Decided:
    """layout: what every switch sets;  shares: by how much a round is slower without each that left its default;
    total: how many times faster a round is than with all defaults"""

    layout: Layout
    shares: Mapping[str, float]
    total: float


def faster(new: Timed, old: Timed, rounds: float = math.inf) -> bool:
    """Beyond noise; and so much that `rounds` rounds pay what it takes before the first."""
    if statistics.mean(a < b for a, b in zip(new.seconds, old.seconds)) < AGREE or new.to(old) > 1 - NOISE:
        return False
    saved = statistics.median(old.seconds) - statistics.median(new.seconds)
    return saved * rounds > new.start - old.start


def decide(switches: Sequence[Switch], trial: Trial, rounds: float = math.inf) -> Decided:
    """Sweep over the switches until none changes, and drop those that are worth nothing beside the others; then try on
    top of them, once, what has to be built. All are dropped where they are not faster than the defaults. rounds: of the
    run, which have to pay for what is built."""
    standing = [switch.choices[0] for switch in switches]
    chosen = list(standing)
    light, built = ([i for i, switch in enumerate(switches) if switch.built is wanted] for wanted in (False, True))
    for _ in range(SWEEPS):
        before = list(chosen)
        for i in light:
            chosen[i] = _best(i, switches[i], chosen, trial, rounds)
        if chosen == before:
            break
    worth = _worth(light, chosen, standing, trial)
    for i, share in worth.items():
        if share <= 1 + NOISE:
            chosen[i] = standing[i]
    for i in built:
        chosen[i] = _best(i, switches[i], chosen, trial, rounds)
    worth |= _worth(built, chosen, standing, trial)
    kept = [i for i, choice in enumerate(chosen) if choice != standing[i]]
    if kept:
        now, before = trial([_joined(chosen), _joined(standing)])
        if faster(now, before, rounds):
            return Decided(_joined(chosen), {switches[i].name: worth[i] for i in kept}, before.to(now))
    return Decided(_joined(standing), {}, 1.0)


def _worth(which: Sequence[int], chosen: list[Layout], standing: list[Layout], trial: Trial) -> dict[int, float]:
    """How long a round takes without each of these switches that left its default, over what it takes with all."""
    changed = [i for i in which if chosen[i] != standing[i]]
    if not changed:
        return {}
    now, *without = trial([_joined(chosen), *(_joined([*chosen[:i], standing[i], *chosen[i + 1 :]]) for i in changed)])
    return {i: other.to(now) for i, other in zip(changed, without)}


def _best(i: int, switch: Switch, chosen: list[Layout], trial: Trial, rounds: float) -> Layout:
    """The choice of one switch, the others being as they are."""
    here = chosen[i]
    others = [choice for choice in switch.choices if choice != here]
    now, *timed = trial([_joined([*chosen[:i], choice, *chosen[i + 1 :]]) for choice in (here, *others)])
    best = min(range(len(others)), key=lambda k: timed[k].to(now))
    return others[best] if faster(timed[best], now, rounds) else here


def _joined(choices: Sequence[Layout]) -> Layout:
    return {field: value for choice in choices for field, value in choice.items()}
