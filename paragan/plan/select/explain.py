"""Why a strategy is the first, and what speaks against the others: from where their time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from paragan.plan.predict.predict import Prediction
from paragan.plan.select.candidates import GIVES_UP, Promise

LINKS = {"latency": "the links' latency", "bandwidth": "the links' bandwidth"}
WORTH = 0.05  # of a round: what is worth a word
SAME = 0.005  # of the time: no difference


class Row(Protocol):
    """What is said of a choice (search.Choice)."""

    @property
    def name(self) -> str: ...
    @property
    def batch(self) -> int: ...
    @property
    def promise(self) -> Promise: ...
    @property
    def prediction(self) -> Prediction: ...
    @property
    def hours(self) -> float: ...
    @property
    def fits(self) -> bool: ...
    @property
    def limits(self) -> tuple[str, ...]: ...


class Wanted(Protocol):
    """What was asked for (search.Goal)."""

    @property
    def memory(self) -> int: ...
    @property
    def margin(self) -> float: ...


def why_first(first: Row, others: Sequence[Row], margin: float) -> str:
    sound = [row for row in others if row.fits and not row.limits and row.promise != "a game per label"]
    alone = f"{first.prediction.efficiency:.0%} of what its workers would do alone"
    if first.promise == "as one worker":
        faster = max((first.hours / row.hours - 1 for row in sound), default=0.0)
        if faster <= SAME:
            return f"as one worker would, {alone}; nothing that gives some of that up is faster"
        worth = f"{margin * GIVES_UP['compressed']:.0%} to {margin:.0%}"
        return f"as one worker would, {alone}; {faster:.1%} faster is not worth what is given up ({worth} is)"
    exact = next((row for row in sound if row.promise == "as one worker"), None)
    if exact is None:
        return f"the fastest of those that nothing speaks against, {alone}"
    return f"{times(exact.hours / first.hours)} as fast as {exact.name}, which {loss(exact.prediction)}; {alone}"


def against(row: Row, first: Row, wanted: Wanted) -> str:
    """One reason, the strongest."""
    slower = row.hours / first.hours - 1
    if not row.fits:
        return f"needs {row.prediction.memory_bytes / 1e9:.3g} GB a rank, and there are {wanted.memory / 1e9:.3g}"
    if row.promise == "a game per label":
        return f"another model, a generator for every label; {_pace(slower)}"
    if row.limits and not first.limits:
        return f"{row.limits[0]}; {_pace(slower)}"
    if slower < -SAME:
        worth = wanted.margin * (GIVES_UP[row.promise] - GIVES_UP[first.promise])
        return f"{1 / (1 + slower) - 1:.1%} faster, and {worth:.1%} is asked for, since {_gives_up(row.promise)}"
    if slower <= SAME:
        return _same(row, first)
    if row.batch != first.batch:
        return f"{_pace(slower)} with batch {row.batch}"
    return f"{_pace(slower)}: {loss(row.prediction)}"


def _same(row: Row, first: Row) -> str:
    mine, theirs = row.prediction.sent_bytes, first.prediction.sent_bytes
    if row.promise == "compressed" and first.promise == "as one worker" and mine < theirs:
        return "as fast: it sends less for nothing, since computing hides the exact wire"
    if mine > theirs > 0:
        return f"as fast, and sends {times(mine / theirs)} the bytes"
    return "as fast" if row.promise == first.promise else f"as fast, and {_gives_up(row.promise)}"


def _gives_up(promise: Promise) -> str:
    words: dict[Promise, str] = {
        "compressed": "gradients lose digits",
        "stale": "players see each other as they were",
        "decentralized": "ranks differ",
        "periodic": "ranks drift apart between exchanges",
    }
    return words.get(promise, "no better")


def loss(prediction: Prediction) -> str:
    """Where most of a round goes that is not computing."""
    step, spent = prediction.step_s, prediction.spent
    shares = {name: spent.get(name, 0.0) / step for name in ("latency", "bandwidth", "handling", "waiting")}
    name, share = max(shares.items(), key=lambda one: one[1])
    if share < WORTH:
        return f"computes {1000 * prediction.compute_s:.3g} ms a round"
    if name == "handling":
        return f"spends {share:.0%} of a round on packing and mixing messages"
    return f"waits {share:.0%} of a round for {LINKS.get(name, 'others')}"


def _pace(slower: float) -> str:
    if slower > SAME:
        return f"{times(1 + slower)} the time"
    return "as fast" if slower >= -SAME else f"{-slower:.0%} less time"


def times(factor: float) -> str:
    return f"{factor:.2f}x" if factor < 10 else f"{factor:,.0f}x"
