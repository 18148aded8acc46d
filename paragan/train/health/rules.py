"""Rules that find what is wrong with a run: pure functions of the last lines of stats.jsonl.

>>> detect(rows, HealthOptions())
[Finding("collapse", "mode collapse: fakes of one label vary 0.06 times as much as reals, before 0.77 times", ...)]

A rule compares the last `patience_ticks` lines with those before (`HISTORY_LINES` in all). docs/health.md says how the
limits were found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paragan.config.sections import HealthOptions

Row = Mapping[str, Any]
HISTORY_LINES = 50  # lines that rules look at
MIN_HISTORY_LINES = 5  # lines before those that are judged, for a comparison

ADVICE = {
    "nonfinite": "lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1",
    "overshoot": "lower --d.optimizer.lr or --g.optimizer.lr, or add --d.warm_up_kimg or --g.warm_up_kimg",
    "divergence": "lower --d.optimizer.lr and --g.optimizer.lr, or add --objective.r1",
    "collapse": "look at the grids of fakes; lower --d.optimizer.lr, or add --objective.r1 or --objective.augment",
    "d_saturated": "lower --d.optimizer.lr, or add --objective.r1 or --objective.augment=ada",
    "stalled": "lower --d.optimizer.lr and --g.optimizer.lr",
    "no_update": "check its learning rate, and which of its parameters require gradients",
    "drift": "start replicas alike, on hosts that round alike (--device.threads)",
    "consensus": "lower the learning rates, or mix more: --strategy.rounds, --strategy.topology",
    "noisy_label": "look at its images in reals.png, and with `paragan data inspect`",
}
# kinds that going back to a checkpoint may cure
ROLLBACK_KINDS = ("nonfinite", "overshoot", "divergence", "collapse", "d_saturated", "stalled", "drift")


@dataclass(frozen=True)
class Finding:
    """Something wrong with a run, and the value that shows it.

    key            : the key of stats.jsonl
    value, limit   : its value, and the limit that it crossed
    last_good_step : the last step known to be good
    """

    kind: str
    message: str
    key: str
    value: float
    limit: float
    last_good_step: int = 0

    @property
    def advice(self) -> str:
        """What to change."""
        return ADVICE[self.kind]


def detect(rows: Sequence[Row], options: HealthOptions) -> list[Finding]:
    """Return what the last of these lines shows, the gravest first."""
    return [finding for detector in DETECTORS for finding in detector(rows, options)]


def get_number(row: Row, key: str) -> float:
    """Return a number of a line; NaN if it is absent or was not finite."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) else math.nan


def _split_history(rows: Sequence[Row], options: HealthOptions, key: str) -> tuple[list[float], list[float], int]:
    """Return (values of the ticks that are judged, finite values before, step of the last tick before).

    The first list is empty if there are fewer than `patience_ticks` lines with this key.
    """
    with_key = [row for row in rows if key in row]
    recent = with_key[-options.patience_ticks :]
    before = with_key[: -options.patience_ticks]
    now = [get_number(row, key) for row in recent] if len(recent) == options.patience_ticks else []
    past = [value for row in before if math.isfinite(value := get_number(row, key))]
    last_good_step = int(get_number(before[-1], "Progress/step")) if before else 0
    return now, past, last_good_step


def _detect_nonfinite(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    last = rows[-1]
    for key in last:
        if key.startswith(("Loss/", "Health/")) and not math.isfinite(get_number(last, key)):
            step = int(get_number(last, "Progress/step"))
            yield Finding("nonfinite", f"{key} is not finite: the game diverged", key, math.nan, math.inf, step)
            return


def _detect_beyond_limit(
    rows: Sequence[Row], kind: str, quantity: str, limit: float, message: str
) -> Iterator[Finding]:
    """Find a value of a player that is beyond its limit in the last line, even if for the first time."""
    for player in "GD":
        key = f"Health/{player}/{quantity}"
        now = get_number(rows[-1], key)
        if now > limit:
            good = [row for row in rows[:-1] if get_number(row, key) <= limit]
            last_good_step = int(get_number(good[-1], "Progress/step")) if good else 0
            yield Finding(kind, message.format(player=player, now=now), key, now, limit, last_good_step)
            return


def _detect_overshoot(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    message = "a step of {player} changed its weights by {now:.2g} of their norm: its steps are too long"
    yield from _detect_beyond_limit(rows, "overshoot", "step", options.max_update, message)


def _detect_divergence(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    for key in ("Health/D/gradient", "Health/G/gradient", "Loss/D/loss", "Loss/G/loss"):
        now, past, last_good_step = _split_history(rows, options, key)
        if not now or len(past) < MIN_HISTORY_LINES:
            continue
        usual = median(map(abs, past)) + (1.0 if key.startswith("Loss/") else 0.0)  # a loss may be near 0
        limit = options.divergence_factor * usual
        if min(map(abs, now)) > limit > 0:
            message = f"{key} is {now[-1]:.3g}, before {usual:.3g}: the game diverges"
            yield Finding("divergence", message, key, now[-1], limit, last_good_step)
            return


def _detect_collapse(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    key = "Health/G/diversity"
    now, past, last_good_step = _split_history(rows, options, key)
    if not now or len(past) < MIN_HISTORY_LINES:
        return
    usual = median(past)
    limit = options.collapse_factor * usual
    if max(now) < limit:
        message = (
            f"mode collapse: fakes of one label vary {now[-1]:.2g} times as much as reals, before {usual:.2g} times"
        )
        yield Finding("collapse", message, key, now[-1], limit, last_good_step)


def _vanishing_gradient(
    rows: Sequence[Row], options: HealthOptions, player: str, min_history: int
) -> tuple[float, float, int] | None:
    """Return (gradient norm, limit, last good step) if a player's gradient is below the limit, else None."""
    now, past, last_good_step = _split_history(rows, options, f"Health/{player}/gradient")
    if not now or len(past) < min_history:
        return None
    limit = options.vanishing_factor * median(past)
    return (now[-1], limit, last_good_step) if max(now) < limit else None


def _detect_d_saturated(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    key = "Health/D/accuracy"
    now, _, last_good_step = _split_history(rows, options, key)
    if now and min(now) >= options.d_saturation and _vanishing_gradient(rows, options, "D", 1):
        message = f"discriminator saturated: {now[-1]:.1%} accuracy, vanishing gradient"
        yield Finding("d_saturated", message, key, now[-1], options.d_saturation, last_good_step)


def _detect_stalled(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    accuracies, _, _ = _split_history(rows, options, "Health/D/accuracy")
    if accuracies and max(accuracies) >= options.d_saturation:
        return
    for player in "DG":
        vanishing = _vanishing_gradient(rows, options, player, MIN_HISTORY_LINES)
        if vanishing:
            norm, limit, last_good_step = vanishing
            usual = limit / options.vanishing_factor
            message = f"training stalled: the gradient norm of {player} is {norm:.2g}, before {usual:.2g}"
            yield Finding("stalled", message, f"Health/{player}/gradient", norm, limit, last_good_step)
            return


def _detect_no_update(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    for player in "GD":
        key = f"Health/{player}/update_norm"
        now, _, last_good_step = _split_history(rows, options, key)
        if now and max(now) == 0:
            yield Finding("no_update", f"the weights of {player} do not change", key, 0.0, 0.0, last_good_step)


def _detect_replica_drift(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    message = "replicas of {player} differ: they are {now:.2g} of its norm from their mean"
    yield from _detect_beyond_limit(rows, "drift", "replica_drift", options.max_replica_drift, message)


def _detect_consensus_loss(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    for player in "GD":
        key = f"Consensus/{player}"
        now, _, last_good_step = _split_history(rows, options, key)
        if now and min(now) > options.max_consensus_distance:
            message = f"no consensus: ranks are {now[-1]:.2g} of the norm of {player} from their mean"
            yield Finding("consensus", message, key, now[-1], options.max_consensus_distance, last_good_step)
            return


def _detect_noisy_label(rows: Sequence[Row], options: HealthOptions) -> Iterator[Finding]:
    key = "Health/label/roughness"
    now, _, last_good_step = _split_history(rows, options, key)
    others = get_number(rows[-1], "Health/label/others")
    if now and min(now) > options.max_roughness and others < 0.8 * options.max_roughness:
        label = int(get_number(rows[-1], "Health/label/number"))
        message = f"the images of label {label} look like noise (roughness {now[-1]:.2f}; of other labels {others:.2f})"
        yield Finding("noisy_label", message, key, now[-1], options.max_roughness, last_good_step)


DETECTORS: tuple[Callable[[Sequence[Row], HealthOptions], Iterator[Finding]], ...] = (
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
)
