"""Why a strategy is the first, and what speaks against the others: from where their time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paragan.plan.predict.predict import Prediction
from paragan.plan.select.candidates import SEMANTICS_PENALTY, Semantics

LINK_CAUSES = {"latency": "the links' latency", "bandwidth": "the links' bandwidth"}
MIN_SHARE = 0.05  # of a round: what is worth a word
TIE_TOLERANCE = 0.005  # of the time: no difference


class PlanRow(Protocol):
    """What is said of a choice (search.Choice)."""

    @property
    def name(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def semantics(self) -> Semantics: ...
    @property
    def prediction(self) -> Prediction: ...
    @property
    def hours(self) -> float: ...
    @property
    def fits_memory(self) -> bool: ...
    @property
    def limits(self) -> tuple[str, ...]: ...


class PlanGoal(Protocol):
    """What was asked for (search.Goal)."""

    @property
    def memory_bytes(self) -> int: ...
    @property
    def margin(self) -> float: ...


def explain_best(best: PlanRow, others: Sequence[PlanRow], margin: float) -> str:
    sound = [row for row in others if row.fits_memory and not row.limits and row.semantics != "a game per label"]
    alone = f"{best.prediction.efficiency:.0%} of what its workers would do alone"
    if best.semantics == "as one worker":
        faster = max((best.hours / row.hours - 1 for row in sound), default=0.0)
        if faster <= TIE_TOLERANCE:
            return f"as one worker would, {alone}; nothing that gives some of that up is faster"
        worth = f"{margin * SEMANTICS_PENALTY['compressed']:.0%} to {margin:.0%}"
        return f"as one worker would, {alone}; {faster:.1%} faster is not worth what is given up ({worth} is)"
    exact = next((row for row in sound if row.semantics == "as one worker"), None)
    if exact is None:
        return f"the fastest of those that nothing speaks against, {alone}"
    return f"{format_factor(exact.hours / best.hours)} as fast as {exact.name}, which {explain_time_loss(exact.prediction)}; {alone}"


def explain_rejection(row: PlanRow, best: PlanRow, goal: PlanGoal) -> str:
    """One reason, the strongest."""
    slower = row.hours / best.hours - 1
    if not row.fits_memory:
        return f"needs {row.prediction.memory_bytes / 1e9:.3g} GB a rank, and there are {goal.memory_bytes / 1e9:.3g}"
    if row.semantics == "a game per label":
        return f"another model, a generator for every label; {_format_slowdown(slower)}"
    if row.limits and not best.limits:
        return f"{row.limits[0]}; {_format_slowdown(slower)}"
    if slower < -TIE_TOLERANCE:
        worth = goal.margin * (SEMANTICS_PENALTY[row.semantics] - SEMANTICS_PENALTY[best.semantics])
        return (
            f"{1 / (1 + slower) - 1:.1%} faster, and {worth:.1%} is asked for, since {_semantics_cost(row.semantics)}"
        )
    if slower <= TIE_TOLERANCE:
        return _explain_tie(row, best)
    if row.batch != best.batch:
        return f"{_format_slowdown(slower)} with batch {row.batch}"
    return f"{_format_slowdown(slower)}: {explain_time_loss(row.prediction)}"


def _explain_tie(row: PlanRow, best: PlanRow) -> str:
    mine, theirs = row.prediction.sent_bytes, best.prediction.sent_bytes
    if row.semantics == "compressed" and best.semantics == "as one worker" and mine < theirs:
        return "as fast: it sends less for nothing, since computing hides the exact wire"
    if mine > theirs > 0:
        return f"as fast, and sends {format_factor(mine / theirs)} the bytes"
    return "as fast" if row.semantics == best.semantics else f"as fast, and {_semantics_cost(row.semantics)}"


def _semantics_cost(promise: Semantics) -> str:
    words: dict[Semantics, str] = {
        "compressed": "gradients lose digits",
        "stale": "players see each other as they were",
        "decentralized": "ranks differ",
        "periodic": "ranks drift apart between exchanges",
    }
    return words.get(promise, "no better")


def explain_time_loss(prediction: Prediction) -> str:
    """Where most of a round goes that is not computing."""
    step, spent = prediction.step_s, prediction.breakdown_s
    shares = {name: spent.get(name, 0.0) / step for name in ("latency", "bandwidth", "handling", "waiting")}
    name, share = max(shares.items(), key=lambda one: one[1])
    if share < MIN_SHARE:
        return f"computes {1000 * prediction.compute_s:.3g} ms a round"
    if name == "handling":
        return f"spends {share:.0%} of a round on packing and mixing messages"
    return f"waits {share:.0%} of a round for {LINK_CAUSES.get(name, 'others')}"


def _format_slowdown(slower: float) -> str:
    if slower > TIE_TOLERANCE:
        return f"{format_factor(1 + slower)} the time"
    return "as fast" if slower >= -TIE_TOLERANCE else f"{-slower:.0%} less time"


def format_factor(factor: float) -> str:
    return f"{factor:.2f}x" if factor < 10 else f"{factor:,.0f}x"
