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

from paragan.config.resolve import fill_strategy_defaults
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.plan.links import Links
from paragan.plan.predict.predict import Prediction, predict
from paragan.plan.profile.profile import Profile
from paragan.plan.select.candidates import SEMANTICS_PENALTY, Candidate, Semantics
from paragan.plan.select.convergence_limits import find_limits, noise_warnings, ramp_warnings
from paragan.plan.select.explain import explain_best, explain_rejection

DEFAULT_MARGIN = 0.05  # by so much a strategy has to be faster that gives up most
PredictFn = Callable[[Any, Profile, Links, int], Prediction]


@dataclass(frozen=True)
class Goal:
    """What is wanted. kimg: thousands of reals shown to D, at the batch of the run; price: of a host for an hour;
    memory: bytes that a rank has (0: not known)"""

    kimg: float
    host_price_per_h: float | None = None
    memory_bytes: int = 0
    margin: float = DEFAULT_MARGIN


@dataclass(frozen=True)
class Choice:
    """A row of the plan. hours: until the goal;  cost: of all hosts until then;  limits: what it costs of what is
    learnt;  why: it is the first, or is not"""

    name: str
    candidate: Candidate
    semantics: Semantics
    batch: int
    kimg: float
    prediction: Prediction
    hours: float
    cost: float | None
    fits_memory: bool
    limits: tuple[str, ...]
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """rows: the best first;  left_out: name and reason;  warnings: of all rows alike"""

    ranks: int
    goal: Goal
    rows: tuple[Choice, ...]
    excluded: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]

    @property
    def best(self) -> Choice:
        return self.rows[0]


def compare_strategies(
    run: Any,
    candidates: Sequence[Candidate],
    profile: Profile,
    links: Links,
    ranks: int,
    goal: Goal,
    *,
    batches: Sequence[int] = (),
    predict_fn: PredictFn | None = None,
) -> Plan:
    """Of a resolved run. batches: those that are tried, where not the run's own alone. Unusable where nothing fits."""
    predict_fn = predict_fn or predict_with_lags
    candidates, left_out = _split_startable(run, candidates, ranks)
    found = list[Choice]()
    for batch in batches or (run.batch,):
        for option in candidates:
            try:
                found.append(_make_choice(run, option, batch, profile, links, ranks, goal, predict_fn))
            except UsageError as error:
                left_out.append((option.name, str(error)))
    left_out = list(dict.fromkeys(left_out))
    if not found:
        raise UsageError(
            f"no strategy can be planned: {'; '.join(f'{name}: {reason}' for name, reason in left_out[:3])}"
        )
    if goal.memory_bytes and not any(row.fits_memory for row in found):
        _raise_memory_error(run, candidates, profile, links, ranks, goal, predict_fn)
    rows = sorted(found, key=lambda row: _sort_key(row, goal.margin))
    return Plan(
        ranks,
        goal,
        _with_reasons(rows, goal),
        tuple(left_out),
        (*ramp_warnings(run), *noise_warnings(profile, rows[0].batch)),
    )


def _split_startable(
    run: Any, candidates: Sequence[Candidate], ranks: int
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Those that `paragan train` would begin, as the run is; and why not the others."""
    can, cannot = list[Candidate](), list[tuple[str, str]]()
    for option in candidates:
        try:
            validate(fill_strategy_defaults(dataclasses.replace(run, strategy=option.strategy)), ranks)
            can.append(option)
        except UsageError as error:
            cannot.append((option.name, str(error)))
    return can, cannot


def predict_with_lags(run: Any, profile: Profile, links: Links, ranks: int) -> Prediction:
    """A prediction, long enough for messages that may lag to be waited for."""
    with gc_disabled():
        return predict(run, profile, links, ranks, min_rounds=2 * run.strategy.max_message_delay)


@contextlib.contextmanager
def gc_disabled() -> Generator[None]:
    """Inside, nobody looks for cycles among what is alive: with millions of messages that takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _make_choice(
    run: Any,
    candidate: Candidate,
    batch: int,
    profile: Profile,
    links: Links,
    ranks: int,
    goal: Goal,
    predict_fn: PredictFn,
) -> Choice:
    g_batch = run.g_batch * batch // run.batch
    trial = dataclasses.replace(run, strategy=candidate.strategy, batch=batch, g_batch=g_batch)
    prediction = predict_fn(trial, profile, links, ranks)
    kimg = goal.kimg * images_factor(profile, batch, run.batch)
    hours = 1000 * kimg / prediction.images_per_s / 3600
    return Choice(
        name=candidate.name,
        candidate=candidate,
        semantics=candidate.semantics,
        batch=batch,
        kimg=kimg,
        prediction=prediction,
        hours=hours,
        cost=None
        if goal.host_price_per_h is None
        else goal.host_price_per_h * hours * -(-ranks // links.ranks_per_host),
        fits_memory=not goal.memory_bytes or prediction.memory_bytes <= goal.memory_bytes,
        limits=find_limits(candidate.strategy, ranks, prediction.staleness_rounds),
    )


def images_factor(profile: Profile, batch: int, base_batch: int) -> float:
    """How many times the images another batch needs to learn as much: (B + N) / (base + N), where N is the noise scale
    (McCandlish et al. 2018, equation 2.11, in images); the smaller of G's and D's. 1 where it was not measured."""
    noise = min((noise.images for noise in profile.noise_scale.values()), default=float("inf"))
    return 1.0 if noise == float("inf") else (batch + noise) / (base_batch + noise)


def _sort_key(row: Choice, margin: float) -> tuple[bool, bool, float, int]:
    handicap = 1 + margin * SEMANTICS_PENALTY[row.semantics]
    return (
        not row.fits_memory,
        bool(row.limits) or row.semantics == "a game per label",
        row.hours * handicap,
        row.prediction.sent_bytes,
    )


def _with_reasons(rows: Sequence[Choice], goal: Goal) -> tuple[Choice, ...]:
    first = rows[0]
    told = [explain_best(first, rows[1:], goal.margin), *(explain_rejection(row, first, goal) for row in rows[1:])]
    return tuple(dataclasses.replace(row, reason=why) for row, why in zip(rows, told))


def _raise_memory_error(
    run: Any,
    candidates: Sequence[Candidate],
    profile: Profile,
    links: Links,
    ranks: int,
    goal: Goal,
    predict_fn: PredictFn,
) -> None:
    """Unusable names the largest batch that fits, of whole lanes, with any of these strategies."""

    def required_bytes(batch: int) -> int:
        found = list[Choice]()
        for option in candidates:
            try:
                found.append(_make_choice(run, option, batch, profile, links, ranks, goal, predict_fn))
            except UsageError:
                continue
        return min(row.prediction.memory_bytes for row in found)

    fits, fails = 0, run.batch // run.lanes  # images of a lane
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if required_bytes(middle * run.lanes) <= goal.memory_bytes else (fits, middle)
    hint = f"the largest batch that fits is {fits * run.lanes}: --batch {fits * run.lanes}"
    hint = hint if fits else "no batch fits: take more ranks (with --lanes as many), or --nets.checkpointing=true"
    raise UsageError(
        f"a rank needs {format_bytes(required_bytes(run.batch))} for its part of --batch {run.batch}, and has "
        f"{format_bytes(goal.memory_bytes)}; {hint}"
    )


def format_bytes(n: float) -> str:
    return f"{n / 1e9:.3g} GB" if n >= 1e9 else f"{n / 1e6:.3g} MB" if n >= 1e6 else f"{n / 1e3:.3g} kB"
