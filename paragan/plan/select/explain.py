"""Say in words why a strategy is the first of a plan, and why the others are not, from where their time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paragan.plan.predict.predict import Prediction
from paragan.plan.select.candidates import Semantics

WAIT_CAUSES = {"latency": "the links' latency", "bandwidth": "the links' bandwidth", "waiting": "other ranks"}
SEMANTICS_COSTS: dict[Semantics, str] = {
    "compressed": "gradients lose precision",
    "stale": "players use old states of each other",
    "decentralized": "ranks differ",
    "periodic": "ranks drift apart between exchanges",
}
MIN_SHARE = 0.05  # of a round: smaller losses are not mentioned
TIE_TOLERANCE = 0.005  # of the time: smaller differences are none


class PlanRow(Protocol):
    """What an explanation needs of a row (compare.Choice)."""

    @property
    def name(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def semantics(self) -> Semantics: ...
    @property
    def images_factor(self) -> float: ...
    @property
    def prediction(self) -> Prediction: ...
    @property
    def hours(self) -> float: ...
    @property
    def fits_memory(self) -> bool: ...
    @property
    def limits(self) -> tuple[str, ...]: ...


class PlanGoal(Protocol):
    """What an explanation needs of the goal (compare.Goal)."""

    @property
    def memory_bytes(self) -> int: ...
    @property
    def margin(self) -> float: ...


def explain_best(best: PlanRow, others: Sequence[PlanRow], margin: float) -> str:
    """Say why the first row of a plan is the first. `margin` is that of the goal."""
    competitors = [row for row in others if row.fits_memory and not row.limits and row.semantics != "per-label models"]
    efficiency = f"{best.prediction.efficiency:.0%} of the throughput of independent workers"
    if best.semantics == "equivalent":
        gain = max((best.hours / row.hours - 1 for row in competitors), default=0.0)
        if gain <= TIE_TOLERANCE:
            return f"equivalent to one worker, {efficiency}; no approximate strategy reaches the goal sooner"
        return (
            f"equivalent to one worker, {efficiency}; others reach the goal at most {gain:.1%} sooner, and "
            f"{margin:.0%} is needed"
        )
    equivalent = next((row for row in competitors if row.semantics == "equivalent"), None)
    if equivalent is None:
        return f"the fastest strategy without limits, {efficiency}"
    factor = format_factor(equivalent.hours / best.hours)
    cost = f", with {describe_images_factor(best.images_factor)}" if best.images_factor > 1 else ""
    loss = explain_time_loss(equivalent.prediction)
    return f"{factor} as fast as {equivalent.name}, which {loss}{cost}; {efficiency}"


def explain_rejection(row: PlanRow, best: PlanRow, goal: PlanGoal) -> str:
    """Say why a row is not the first: the strongest reason."""
    slower = row.hours / best.hours - 1
    if not row.fits_memory:
        return f"needs {row.prediction.memory_bytes / 1e9:.3g} GB per rank, of {goal.memory_bytes / 1e9:.3g} GB"
    if row.semantics == "per-label models":
        return f"trains other models, one generator per label; {_format_slowdown(slower)}"
    if row.limits and not best.limits:
        return f"{row.limits[0]}; {_format_slowdown(slower)}"
    if slower < -TIE_TOLERANCE:
        cost = _semantics_cost(row.semantics)
        return f"only {1 / (1 + slower) - 1:.1%} faster; {goal.margin:.1%} is needed, since {cost}"
    if slower <= TIE_TOLERANCE:
        return _explain_tie(row, best)
    if row.batch != best.batch:
        return f"{_format_slowdown(slower)} with batch {row.batch}"
    if row.images_factor > best.images_factor:
        return f"{_format_slowdown(slower)}, with {describe_images_factor(row.images_factor)}"
    return f"{_format_slowdown(slower)}: {explain_time_loss(row.prediction)}"


def _explain_tie(row: PlanRow, best: PlanRow) -> str:
    row_bytes = row.prediction.sent_bytes
    best_bytes = best.prediction.sent_bytes
    if row.semantics == "compressed" and best.semantics == "equivalent" and row_bytes < best_bytes:
        return "as fast: sending less saves no time, since computing hides the exact wire"
    if row_bytes > best_bytes > 0:
        return f"as fast, and sends {format_factor(row_bytes / best_bytes)} the bytes"
    return "as fast" if row.semantics == best.semantics else f"as fast, and {_semantics_cost(row.semantics)}"


def _semantics_cost(semantics: Semantics) -> str:
    return SEMANTICS_COSTS.get(semantics, "it is no better")


def describe_images_factor(factor: float) -> str:
    """Say how many times the images a strategy needs (learning_cost.py)."""
    return f"{format_factor(factor)} the images (an estimate)"


def explain_time_loss(prediction: Prediction) -> str:
    """Say where most of a round goes apart from computing, as the end of "STRATEGY, which ..."."""
    seconds = prediction.breakdown_s
    shares = {name: seconds.get(name, 0.0) / prediction.step_s for name in ("latency", "bandwidth", "codec", "waiting")}
    name, share = max(shares.items(), key=lambda item: item[1])
    if share < MIN_SHARE:
        return f"computes {1000 * prediction.compute_s:.3g} ms per round"
    if name == "codec":
        return f"spends {share:.0%} of a round on packing and mixing messages"
    return f"waits {share:.0%} of a round for {WAIT_CAUSES[name]}"


def _format_slowdown(slower: float) -> str:
    if slower > TIE_TOLERANCE:
        return f"{format_factor(1 + slower)} the time"
    return "as fast" if slower >= -TIE_TOLERANCE else f"{-slower:.0%} less time"


def format_factor(factor: float) -> str:
    """Format a factor: "1.25x", "12x"."""
    return f"{factor:.2f}x" if factor < 10 else f"{factor:,.0f}x"
