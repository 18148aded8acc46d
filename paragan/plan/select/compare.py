"""Which strategy pays: every candidate predicted, and ranked by the time to so many images of reals.

plan = search(run, candidates(ranks, profile, run.batch), profile, links, ranks, Goal(kimg=1000))
plan.first.name, plan.first.why

What limits a strategy is put in two: what it costs in time is its prediction's, what it costs in what is learnt is a
`limit` in words. Whoever has a limit stands behind all who have none. Whoever gives something up has to be faster for
it, by its part of the margin (candidates.GIVES_UP): so nothing stands first that is slower by more than the margin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from paragan.config.resolve import settled
from paragan.config.validate import validate
from paragan.core.errors import Unusable
from paragan.plan.links import Links
from paragan.plan.predict.predict import Prediction, predict
from paragan.plan.profile.profile import Profile
from paragan.plan.select.candidates import GIVES_UP, Candidate, Promise
from paragan.plan.select.convergence_limits import limits_of, noise_of, of_ramp
from paragan.plan.select.explain import against, why_first

MARGIN = 0.05  # by so much a strategy has to be faster that gives up most
Predict = Callable[[Any, Profile, Links, int], Prediction]


@dataclass(frozen=True)
class Goal:
    """What is wanted. kimg: thousands of reals shown to D, at the batch of the run; price: of a host for an hour;
    memory: bytes that a rank has (0: not known)"""

    kimg: float
    price: float | None = None
    memory: int = 0
    margin: float = MARGIN


@dataclass(frozen=True)
class Choice:
    """A row of the plan. hours: until the goal;  cost: of all hosts until then;  limits: what it costs of what is
    learnt;  why: it is the first, or is not"""

    name: str
    candidate: Candidate
    promise: Promise
    batch: int
    kimg: float
    prediction: Prediction
    hours: float
    cost: float | None
    fits: bool
    limits: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Plan:
    """rows: the best first;  left_out: name and reason;  warnings: of all rows alike"""

    ranks: int
    goal: Goal
    rows: tuple[Choice, ...]
    left_out: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def first(self) -> Choice:
        return self.rows[0]


def search(
    run: Any,
    options: Sequence[Candidate],
    profile: Profile,
    links: Links,
    ranks: int,
    goal: Goal,
    *,
    batches: Sequence[int] = (),
    play: Predict | None = None,
) -> Plan:
    """Of a resolved run. batches: those that are tried, where not the run's own alone. Unusable where nothing fits."""
    play = play or played
    options, left_out = _played_by(run, options, ranks)
    found = list[Choice]()
    for batch in batches or (run.batch,):
        for option in options:
            try:
                found.append(_choice(run, option, batch, profile, links, ranks, goal, play))
            except Unusable as error:
                left_out.append((option.name, str(error)))
    left_out = list(dict.fromkeys(left_out))
    if not found:
        raise Unusable(f"no strategy can be planned: {'; '.join(f'{name}: {reason}' for name, reason in left_out[:3])}")
    if goal.memory and not any(row.fits for row in found):
        _refuse_memory(run, options, profile, links, ranks, goal, play)
    rows = sorted(found, key=lambda row: _order(row, goal.margin))
    return Plan(ranks, goal, _reasoned(rows, goal), tuple(left_out), (*of_ramp(run), *noise_of(profile, rows[0].batch)))


def _played_by(run: Any, options: Sequence[Candidate], ranks: int) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Those that `paragan train` would begin, as the run is; and why not the others."""
    can, cannot = list[Candidate](), list[tuple[str, str]]()
    for option in options:
        try:
            validate(settled(dataclasses.replace(run, strategy=option.strategy)), ranks)
            can.append(option)
        except Unusable as error:
            cannot.append((option.name, str(error)))
    return can, cannot


def played(run: Any, profile: Profile, links: Links, ranks: int) -> Prediction:
    """A prediction, long enough for messages that may lag to be waited for."""
    with uncollected():
        return predict(run, profile, links, ranks, rounds=2 * getattr(run.strategy, "staleness", 0))


@contextlib.contextmanager
def uncollected() -> Generator[None]:
    """Inside, nobody looks for cycles among what is alive: with millions of messages that takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _choice(
    run: Any,
    option: Candidate,
    batch: int,
    profile: Profile,
    links: Links,
    ranks: int,
    goal: Goal,
    play: Predict,
) -> Choice:
    g_batch = run.g_batch * batch // run.batch
    trial = dataclasses.replace(run, strategy=option.strategy, batch=batch, g_batch=g_batch)
    prediction = play(trial, profile, links, ranks)
    kimg = goal.kimg * images_for(profile, batch, run.batch)
    hours = 1000 * kimg / prediction.images_per_s / 3600
    return Choice(
        name=option.name,
        candidate=option,
        promise=option.promise,
        batch=batch,
        kimg=kimg,
        prediction=prediction,
        hours=hours,
        cost=None if goal.price is None else goal.price * hours * -(-ranks // links.ranks_per_host),
        fits=not goal.memory or prediction.memory_bytes <= goal.memory,
        limits=limits_of(option.strategy, ranks, prediction.staleness),
    )


def images_for(profile: Profile, batch: int, base: int) -> float:
    """How many times the images another batch needs to learn as much: (B + N) / (base + N), where N is the noise scale
    (McCandlish et al. 2018, equation 2.11, in images); the smaller of G's and D's. 1 where it was not measured."""
    noise = min((noise.batch for noise in profile.noise.values()), default=float("inf"))
    return 1.0 if noise == float("inf") else (batch + noise) / (base + noise)


def _order(row: Choice, margin: float) -> tuple[bool, bool, float, int]:
    handicap = 1 + margin * GIVES_UP[row.promise]
    return (
        not row.fits,
        bool(row.limits) or row.promise == "a game per label",
        row.hours * handicap,
        row.prediction.sent_bytes,
    )


def _reasoned(rows: Sequence[Choice], goal: Goal) -> tuple[Choice, ...]:
    first = rows[0]
    told = [why_first(first, rows[1:], goal.margin), *(against(row, first, goal) for row in rows[1:])]
    return tuple(dataclasses.replace(row, why=why) for row, why in zip(rows, told))


def _refuse_memory(
    run: Any, options: Sequence[Candidate], profile: Profile, links: Links, ranks: int, goal: Goal, play: Predict
) -> None:
    """Unusable names the largest batch that fits, of whole lanes, with any of these strategies."""

    def needs(batch: int) -> int:
        found = list[Choice]()
        for option in options:
            try:
                found.append(_choice(run, option, batch, profile, links, ranks, goal, play))
            except Unusable:
                continue
        return min(row.prediction.memory_bytes for row in found)

    fits, fails = 0, run.batch // run.lanes  # images of a lane
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if needs(middle * run.lanes) <= goal.memory else (fits, middle)
    hint = f"the largest batch that fits is {fits * run.lanes}: --batch {fits * run.lanes}"
    hint = hint if fits else "no batch fits: take more ranks (with --lanes as many), or --nets.checkpointing=true"
    raise Unusable(
        f"a rank needs {told_bytes(needs(run.batch))} for its part of --batch {run.batch}, and has "
        f"{told_bytes(goal.memory)}; {hint}"
    )


def told_bytes(n: float) -> str:
    return f"{n / 1e9:.3g} GB" if n >= 1e9 else f"{n / 1e6:.3g} MB" if n >= 1e6 else f"{n / 1e3:.3g} kB"
