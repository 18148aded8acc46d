"""Predict every candidate strategy, and rank them by the time to the goal: `paragan plan`.

plan = compare_strategies(run, default_candidates(ranks, profile, run.batch), profile, links, ranks, Goal(kimg=1000))
plan.best.name, plan.best.reason

A strategy costs time, which is predicted, and may need more images, which was measured (learning_cost.py). What was not
measured is stated in words (`limits`), and such strategies rank behind all others. A strategy that is not equivalent to
one worker must reach the goal sooner by the margin. So the first one never takes longer than another one by more than
the margin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from paragan.config.resolve import fill_strategy_defaults
from paragan.config.validate import validate
from paragan.core.errors import UsageError
from paragan.plan.cost import format_bytes
from paragan.plan.links import Links
from paragan.plan.predict.predict import Prediction, predict
from paragan.plan.profile.profile import Profile
from paragan.plan.select.candidates import Candidate, Semantics
from paragan.plan.select.convergence_limits import find_limits, noise_warnings, ramp_warnings
from paragan.plan.select.explain import explain_best, explain_rejection
from paragan.plan.select.learning_cost import images_needed

DEFAULT_MARGIN = 0.05  # by which a strategy that is not equivalent to one worker must be faster
PredictFn = Callable[[Any, Profile, Links, int], Prediction]


@dataclass(frozen=True)
class Goal:
    """What a plan is made for."""

    kimg: float  # thousands of real images shown to D, with the batch of the run
    host_price_per_h: float | None = None
    memory_bytes: int = 0  # of a rank; 0: unknown
    margin: float = DEFAULT_MARGIN


@dataclass(frozen=True)
class Choice:
    """A row of the plan.

    semantics : what the strategy computes, compared with one worker
    images_factor : how many times the images of its exact baseline the strategy needs (learning_cost.py)
    kimg      : that this batch and strategy need to reach the goal
    hours     : to the goal
    cost      : of all hosts until then
    limits    : why it may converge worse than was measured
    reason    : why it is the first, or is not
    """

    name: str
    candidate: Candidate
    semantics: Semantics
    batch: int
    images_factor: float
    kimg: float
    prediction: Prediction
    hours: float
    cost: float | None
    fits_memory: bool
    limits: tuple[str, ...]
    reason: str = ""

    def penalize(self, time: float, margin: float) -> float:
        """Return a time that `margin` is added to, unless the strategy is equivalent to one worker."""
        return time if self.semantics == "equivalent" else (1 + margin) * time


@dataclass(frozen=True)
class Plan:
    """The ranked candidates."""

    ranks: int
    goal: Goal
    rows: tuple[Choice, ...]  # the best first
    excluded: tuple[tuple[str, str], ...]  # name and reason
    warnings: tuple[str, ...]  # that concern all rows

    @property
    def best(self) -> Choice:
        """The first row."""
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
    """Predict and rank candidates for a resolved run.

    Args:
        run: resolved; its strategy is ignored.
        candidates: to compare.
        profile: of one worker.
        links: between hosts.
        ranks: of the run.
        goal: to reach.
        batches: total batches to compare; default: that of the run.
        predict_fn: replaces the prediction, for tests.

    Raises:
        UsageError: no candidate can start, or none fits into memory.
    """
    predict_fn = predict_fn or predict_with_lags
    candidates, excluded = _split_startable(run, candidates, ranks)
    choices = list[Choice]()
    for batch in batches or (run.batch,):
        for candidate in candidates:
            try:
                choices.append(_make_choice(run, candidate, batch, profile, links, ranks, goal, predict_fn))
            except UsageError as error:
                excluded.append((candidate.name, str(error)))
    excluded = list(dict.fromkeys(excluded))
    if not choices:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in excluded[:3])
        raise UsageError(f"no strategy can be planned: {reasons}")
    if goal.memory_bytes and not any(row.fits_memory for row in choices):
        _raise_memory_error(run, candidates, profile, links, ranks, goal, predict_fn)
    rows = sorted(choices, key=lambda row: _sort_key(row, goal.margin))
    warnings = (*ramp_warnings(run), *noise_warnings(profile, rows[0].batch))
    return Plan(ranks, goal, _with_reasons(rows, goal), tuple(excluded), warnings)


def _split_startable(
    run: Any, candidates: Sequence[Candidate], ranks: int
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Return the candidates that `paragan train` would start with this run, and the reasons against the others."""
    startable = list[Candidate]()
    excluded = list[tuple[str, str]]()
    for candidate in candidates:
        try:
            validate(fill_strategy_defaults(dataclasses.replace(run, strategy=candidate.strategy)), ranks)
            startable.append(candidate)
        except UsageError as error:
            excluded.append((candidate.name, str(error)))
    return startable, excluded


def predict_with_lags(run: Any, profile: Profile, links: Links, ranks: int) -> Prediction:
    """Predict over enough rounds that even the slowest asynchronous message arrives."""
    with gc_disabled():
        return predict(run, profile, links, ranks, min_rounds=2 * run.strategy.max_message_delay)


@contextlib.contextmanager
def gc_disabled() -> Generator[None]:
    """Disable garbage collection inside: with millions of messages it takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
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
    factor = images_needed(candidate.strategy, ranks, prediction.staleness_rounds)
    kimg = goal.kimg * batch_images_factor(profile, batch, run.batch) * factor
    hours = 1000 * kimg / prediction.images_per_s / 3600
    cost = None
    if goal.host_price_per_h is not None:
        hosts = -(-ranks // links.ranks_per_host)
        cost = goal.host_price_per_h * hours * hosts
    return Choice(
        name=candidate.name,
        candidate=candidate,
        semantics=candidate.semantics,
        batch=batch,
        images_factor=factor,
        kimg=kimg,
        prediction=prediction,
        hours=hours,
        cost=cost,
        fits_memory=not goal.memory_bytes or prediction.memory_bytes <= goal.memory_bytes,
        limits=find_limits(candidate.strategy, ranks, prediction.staleness_rounds),
    )


def batch_images_factor(profile: Profile, batch: int, base_batch: int) -> float:
    """Return how many times the images a batch needs to learn as much as with `base_batch`.

    It is (batch + N) / (base_batch + N), where N is the smaller noise scale of G and D, in images (McCandlish et al.
    2018, equation 2.11); 1 if no noise scale was measured.
    """
    noise = min((noise.images for noise in profile.noise_scale.values()), default=math.inf)
    return 1.0 if noise == math.inf else (batch + noise) / (base_batch + noise)


def _sort_key(row: Choice, margin: float) -> tuple[bool, bool, float, int]:
    return (
        not row.fits_memory,
        bool(row.limits) or row.semantics == "per-label models",
        row.penalize(row.hours, margin),
        row.prediction.sent_bytes,
    )


def _with_reasons(rows: Sequence[Choice], goal: Goal) -> tuple[Choice, ...]:
    best = rows[0]
    reasons = [explain_best(best, rows[1:], goal.margin), *(explain_rejection(row, best, goal) for row in rows[1:])]
    return tuple(dataclasses.replace(row, reason=reason) for row, reason in zip(rows, reasons))


def _raise_memory_error(
    run: Any,
    candidates: Sequence[Candidate],
    profile: Profile,
    links: Links,
    ranks: int,
    goal: Goal,
    predict_fn: PredictFn,
) -> None:
    """Raise UsageError with the largest batch of whole lanes that fits with any of the candidates (by bisection)."""

    def required_bytes(batch: int) -> int:
        choices = list[Choice]()
        for candidate in candidates:
            try:
                choices.append(_make_choice(run, candidate, batch, profile, links, ranks, goal, predict_fn))
            except UsageError:
                continue
        return min(row.prediction.memory_bytes for row in choices)

    fits = 0  # images of a lane
    fails = run.batch // run.lanes
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if required_bytes(middle * run.lanes) <= goal.memory_bytes:
            fits = middle
        else:
            fails = middle
    if fits:
        hint = f"Use --batch {fits * run.lanes}, the largest that fits"
    else:
        hint = "No batch fits. Use more ranks (with as many --lanes)"
        if not getattr(run.nets, "checkpointing", True):
            hint += ", or --nets.checkpointing=true"
    raise UsageError(
        f"--batch {run.batch}: a rank needs {format_bytes(required_bytes(run.batch))} for its part, and has "
        f"{format_bytes(goal.memory_bytes)}. {hint}"
    )
