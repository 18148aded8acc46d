"""What the lines of stats say of a run's health: pure functions of its last lines.

>>> judge(rows, Health())
[Finding("collapse", "fakes of one label are 0.06 as different as reals, and were 0.77", "Health/G/diversity", ...)]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paragan.config.sections import HealthOptions

Row = Mapping[str, Any]
HISTORY_LINES = 50  # lines that are the past of a run
MIN_HISTORY_LINES = 5  # of them, before anything is compared with it

ADVICE = {
    "nonfinite": "lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1",
    "overshoot": "lower --d.optimizer.lr or --g.optimizer.lr, or add --d.warm_up_kimg or --g.warm_up_kimg",
    "divergence": "lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1",
    "collapse": "look at the grids of fakes; lower --d.optimizer.lr, or add --objective.r1 or --objective.augment",
    "won": "lower --d.optimizer.lr, or add --objective.r1 or --objective.augment=ada",
    "stalled": "lower --d.optimizer.lr and --g.optimizer.lr",
    "frozen": "look at its learning rate, and at what requires gradients",
    "drift": "replicas must be started alike, on hosts that round alike (--device.threads)",
    "consensus": "lower the learning rates, or mix more: --strategy.rounds, --strategy.topology",
    "label": "look at its images in reals.png, and with `paragan data inspect`",
}
ROLLBACK_KINDS = (
    "nonfinite",
    "overshoot",
    "divergence",
    "collapse",
    "won",
    "stalled",
    "drift",
)  # that going back may cure


@dataclass(frozen=True)
class Finding:
    """What is wrong, and which sign showed it.

    since : the last step at which all was well, as far as is known
    """

    kind: str
    message: str
    key: str
    value: float
    limit: float
    last_good_step: int = 0

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]


def detect(rows: Sequence[Row], options: HealthOptions) -> list[Finding]:
    """What the last of these lines shows, the gravest first."""
    return [finding for look in DETECTORS for finding in look(rows, options)]


def get_number(row: Row, key: str) -> float:
    """A number of a line; NaN where it was not finite, or is not there."""
    found = row.get(key)
    return float(found) if isinstance(found, int | float) else math.nan


def _split_history(rows: Sequence[Row], options: HealthOptions, key: str) -> tuple[list[float], list[float], int]:
    """The values of the ticks that are judged, those before, and the step after the last of them."""
    there = [row for row in rows if key in row]
    now, past = there[-options.patience_ticks :], there[: -options.patience_ticks]
    known = [x for row in past if math.isfinite(x := get_number(row, key))]
    since = int(get_number(past[-1], "Progress/step")) if past else 0
    return [get_number(row, key) for row in now] if len(now) == options.patience_ticks else [], known, since


def _detect_nonfinite(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    last = rows[-1]
    watched = [key for key in last if key.startswith(("Loss/", "Health/")) and not math.isfinite(get_number(last, key))]
    for key in watched[:1]:
        step = int(get_number(last, "Progress/step"))
        yield Finding("nonfinite", f"{key} is not finite: the game diverged", key, math.nan, math.inf, step)


def _detect_beyond_limit(
    rows: Sequence[Row], kind: str, quantity: str, limit: float, message: str
) -> Iterator[Finding]:
    """A number of a player that is beyond its limit in the last line, be it for the first time."""
    for player in "GD":
        key = f"Health/{player}/{quantity}"
        now = get_number(rows[-1], key)
        if now > limit:
            good = [row for row in rows[:-1] if get_number(row, key) <= limit]
            since = int(get_number(good[-1], "Progress/step")) if good else 0
            yield Finding(kind, message.format(player=player, now=now), key, now, limit, since)
            return


def _detect_overshoot(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    message = "a step of {player} changed its weights by {now:.2g} of their norm: its steps are too long"
    yield from _detect_beyond_limit(rows, "overshoot", "step", options.max_update, message)


def _detect_divergence(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    for key in ("Health/D/gradient", "Health/G/gradient", "Loss/D/loss", "Loss/G/loss"):
        now, past, since = _split_history(rows, options, key)
        if not now or len(past) < MIN_HISTORY_LINES:
            continue
        usual = median(map(abs, past)) + (1.0 if key.startswith("Loss/") else 0.0)  # a loss may be near 0
        if min(map(abs, now)) > options.divergence_factor * usual > 0:
            message = f"{key} is {now[-1]:.3g}, and was {usual:.3g}: the game diverges"
            yield Finding("divergence", message, key, now[-1], options.divergence_factor * usual, since)
            return


def _detect_collapse(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    key = "Health/G/diversity"
    now, past, since = _split_history(rows, options, key)
    if now and len(past) >= MIN_HISTORY_LINES and max(now) < (limit := options.collapse_factor * median(past)):
        message = f"fakes of one label differ {now[-1]:.2g} times as much as reals do, and did {median(past):.2g} times"
        yield Finding("collapse", message, key, now[-1], limit, since)


def _vanishing_gradient(
    rows: Sequence[Row], options: HealthOptions, player: str, min_history: int
) -> tuple[float, float, int] | None:
    """A gradient, what it should not be below, and since when it is."""
    now, past, since = _split_history(rows, options, f"Health/{player}/gradient")
    if not now or len(past) < min_history or max(now) >= (limit := options.vanishing_factor * median(past)):
        return None
    return now[-1], limit, since


def _detect_d_saturated(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    key = "Health/D/accuracy"
    now, _, since = _split_history(rows, options, key)
    if now and min(now) >= options.d_saturation and _vanishing_gradient(rows, options, "D", 1):
        message = f"D tells {now[-1]:.1%} of reals from fakes and has nothing left to learn: it has won"
        yield Finding("won", message, key, now[-1], options.d_saturation, since)


def _detect_stalled(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    now, _, _ = _split_history(rows, options, "Health/D/accuracy")
    for player in "DG":
        found = _vanishing_gradient(rows, options, player, MIN_HISTORY_LINES)
        if found and (not now or max(now) < options.d_saturation):
            size, limit, since = found
            message = f"the gradient of {player} is {size:.2g}, and was {limit / options.vanishing_factor:.2g}: the game stands still"
            yield Finding("stalled", message, f"Health/{player}/gradient", size, limit, since)
            return


def _detect_no_update(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    for player in "GD":
        key = f"Health/{player}/moved"
        now, _, since = _split_history(rows, options, key)
        if now and max(now) == 0:
            yield Finding("frozen", f"{player} does not move: its weights are what they were", key, 0.0, 0.0, since)


def _detect_replica_drift(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    message = "ranks should hold the same {player}, and are {now:.2g} of its norm from their mean"
    yield from _detect_beyond_limit(rows, "drift", "apart", options.max_replica_drift, message)


def _detect_consensus_loss(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    for player in "GD":
        key = f"Consensus/{player}"
        now, _, since = _split_history(rows, options, key)
        if now and min(now) > options.max_consensus_distance:
            message = f"ranks are {now[-1]:.2g} of the norm of {player} from their mean: they do not train one network"
            yield Finding("consensus", message, key, now[-1], options.max_consensus_distance, since)
            return


def _detect_noisy_label(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    key = "Health/label/roughness"
    now, _, since = _split_history(rows, options, key)
    others = get_number(rows[-1], "Health/label/others")
    if now and min(now) > options.max_roughness and others < 0.8 * options.max_roughness:
        label = int(get_number(rows[-1], "Health/label/number"))
        message = f"the images of label {label} look like noise (roughness {now[-1]:.2f}; of other labels {others:.2f})"
        yield Finding("label", message, key, now[-1], options.max_roughness, since)


DETECTORS: tuple[Callable[[Sequence[Row], HealthOptions], Iterator[Finding]], ...] = (
    *(
        _detect_nonfinite,
        _detect_replica_drift,
        _detect_overshoot,
        _detect_divergence,
        _detect_collapse,
        _detect_d_saturated,
        _detect_stalled,
        _detect_no_update,
        _detect_consensus_loss,
        _detect_noisy_label,
    ),
)
