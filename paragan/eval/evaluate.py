"""Scores of a generator, each with the protocol it was measured under.

    found = evaluate(sample, reals, space=pixels(32, 3), metrics=["fd", "prdc"], count=10_000, group=everyone)
    found[0].name, found[0].value        # "fd_pixels", 3.1

`sample` maps a range of indices to images, image i depending on i alone; then a score depends neither on the
number of ranks nor on the batch. Two scores may be compared where `comparable` finds nothing.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paragan.core.errors import UsageError
from paragan.eval.accumulators import FeaturePass, ShouldAbort, never_abort, unique_accumulators
from paragan.eval.feature_stats import FeatureStats, ImageArray, LabelsFn, SampleFn, array_sampler, extract
from paragan.eval.features import FeatureSpace
from paragan.eval.metrics import (
    DEFAULT_COUNT,
    METRICS,
    Metric,
    MetricInputs,
    check_labels,
    get_metric,
    metric_names,
    num_fakes,
)
from paragan.eval.reference_stats import cached_reference
from paragan.eval.sharding import SINGLE, ReduceGroup

Value = str | int | float | bool | None


@dataclass(frozen=True)
class EvalProtocol:
    """What the caller knows about how fakes and reals came about; None where it does not.

    `batch_norm` is how the generator's batch norm ran: "none" (it has none), "running" (statistics kept in
    training), "standing" (estimated afterwards) or "batch of 64" (of the batch at hand, so that the score
    depends on the batch).
    """

    data: str | None = None  # which dataset, at which resolution, resized how
    split: str | None = None  # of the reals: train, test, all
    labels: str | None = None  # of the fakes: none, uniform, or as in the data
    batch_norm: str | None = None
    ema: bool | None = None  # whether the averaged generator was scored
    truncation: float | None = None  # psi, 1 for none
    seed: int = 0  # of the latents, and of the subsets and splits that kid and is draw


@dataclass(frozen=True)
class ClassLabels:
    """What scores that go class by class need."""

    names: tuple[str, ...]  # of the classes
    reals: np.ndarray | None = None  # int64 [N]
    fakes: LabelsFn | None = None  # of a range of indices, as they were asked of the generator


NO_LABELS = ClassLabels(())
SWEEP_FIELDS = ("truncation", "seed")  # which images of a model are scored; how they are is the same


@dataclass(frozen=True)
class Score:
    """One number, how it was measured, and what to keep in mind about it."""

    name: str
    value: float
    protocol: Mapping[str, Value]
    seconds: float  # seeing the images, which all scores of a call share, and its own arithmetic
    notes: tuple[str, ...] = ()
    error: float | None = None  # how far arithmetic may have moved the value, where that is known
    per_class: Mapping[str, float] | None = None  # the value of each class, by its name

    @property
    def fingerprint(self) -> str:
        """12 hex digits; equal for protocols that are equal but for truncation and seed."""
        alike = {name: value for name, value in self.protocol.items() if name not in SWEEP_FIELDS}
        return hashlib.sha256(json.dumps(alike, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self, kimg: float | None = None) -> dict[str, Any]:
        """A line of metrics.jsonl; of `notes`, `error` and `per_class` what there is. `kimg`: thousands of images
        trained on."""
        return {
            "name": self.name,
            "value": self.value,
            **({} if kimg is None else {"kimg": kimg}),
            "protocol": dict(self.protocol),
            "fingerprint": self.fingerprint,
            "seconds": round(self.seconds, 3),
            **({"notes": list(self.notes)} if self.notes else {}),
            **({} if self.error is None else {"error": self.error}),
            **({} if self.per_class is None else {"per_class": dict(self.per_class)}),
        }


def protocol_differences(a: Score | Mapping[str, Any], b: Score | Mapping[str, Any]) -> list[str]:
    """The fields in which two scores, or their lines of metrics.jsonl, were measured differently.

    Empty where they may be compared, as the lines of one sweep may: they differ in truncation and seed alone. `name` is
    among them where the scores have different names.
    """
    a, b = (s.to_json() if isinstance(s, Score) else s for s in (a, b))
    one, other = {**a["protocol"], "name": a["name"]}, {**b["protocol"], "name": b["name"]}
    absent = object()
    fields = {*one, *other} - {*SWEEP_FIELDS}
    return sorted(key for key in fields if one.get(key, absent) != other.get(key, absent))


def evaluate(
    fakes: SampleFn,
    reals: ImageArray | FeatureStats | None,
    *,
    space: FeatureSpace,
    metrics: Sequence[str],
    protocol: EvalProtocol | None = None,
    count: int | None = None,
    group: ReduceGroup = SINGLE,
    batch: int = 64,
    device: torch.device | str = "cpu",
    labels: ClassLabels = NO_LABELS,
    should_abort: ShouldAbort = never_abort,
) -> list[Score]:
    """Score `count` fakes against all of `reals` by each of `metrics`; the same list on every rank.

    `fakes` gives the images of a range of indices, uint8 [len, C, H, W] in [0, 255]; image i must depend on i
    alone. Each rank asks for its share, blocks of `batch`, the same blocks for any number of ranks. `reals`
    is uint8 [N, H, W, C], or what `summarize` made of it (which saves seeing them again), or None if no
    metric looks at them.

    Every rank calls this, with equal arguments. Raises `Unusable` before any image is drawn for metrics that
    are unknown or not defined in `space`, for a `count` that a metric's name contradicts, for metrics that lack
    `labels`, and for reals that do not fit. `heed` is told between blocks how many fakes were seen; where it is true
    on all ranks, `GivenUp` is raised.
    """
    protocol = protocol or EvalProtocol()
    names = {name: metric_names(name, space) for name in metrics}
    count = num_fakes(metrics, count)
    check_labels(metrics, space, len(labels.names) if labels.fakes else 0)
    against = [name for name in metrics if METRICS[name].real_accumulators]
    start = time.perf_counter()
    how: dict[str, Any] = {"space": space, "group": group, "batch": batch, "device": device, "labels": labels}
    real = _real_stats(reals, against, how) if against else FeatureStats(space, (), 0, {})
    readings = unique_accumulators([METRICS[name].fake_accumulators for name in metrics])
    seeing = FeaturePass(
        space, _check_count(count), batch, len(labels.names), protocol.seed, torch.device(device), should_abort
    )
    fake = extract(fakes, seeing, readings, group, labels.fakes)
    if real.image_shape and real.image_shape != fake.image_shape:
        shapes = f"{_format_shape(real.image_shape)} (CxHxW), the fakes {_format_shape(fake.image_shape)}"
        raise UsageError(f"reals: images are {shapes}; they must agree")
    given = MetricInputs(real, fake, group, protocol.seed, labels.names, torch.device(device))
    shared = time.perf_counter() - start
    return [s for name, called in names.items() for s in _scores(METRICS[name], called, given, protocol, shared)]


def _scores(
    metric: Metric, names: Sequence[str], inputs: MetricInputs, protocol: EvalProtocol, shared_s: float
) -> list[Score]:
    """One metric's, by the names they are called; shared_s: what seeing the images took."""
    start = time.perf_counter()
    values = metric.compute(inputs, **metric.settings)
    seconds = shared_s + time.perf_counter() - start
    real, fake = inputs.real, inputs.fake
    record = _protocol_fields(metric, protocol, real if metric.real_accumulators else None, fake)
    notes = (*metric.notes(fake.space, real, fake), *fake.space.notes)
    named = zip(names, values, strict=False)  # pr50k3_full reports but two of four
    return [
        Score(name, one.value, record, seconds, (*one.notes, *notes), one.error, one.per_class) for name, one in named
    ]


def _real_stats(
    reals: ImageArray | FeatureStats | None, metrics: Sequence[str], options: Mapping[str, Any]
) -> FeatureStats:
    """A summary of reals that serves these metrics, made if it was not given."""
    if reals is None:
        raise UsageError(f"reals: {metrics[0]} compares with real images, uint8 [N, H, W, C], and none were given")
    if not isinstance(reals, FeatureStats):
        return compute_feature_stats(reals, metrics=metrics, **options)
    if reals.space != options["space"]:
        raise UsageError(f"reals: summarized in the space {reals.space.name}, not {options['space'].name}; do it again")
    for reading in unique_accumulators([METRICS[name].real_accumulators for name in metrics]):
        reals.get(reading)
    return reals


def _protocol_fields(
    metric: Metric, protocol: EvalProtocol, real: FeatureStats | None, fake: FeatureStats
) -> dict[str, Value]:
    """What is written of how a score was measured; `reals` is the number of those it was compared with, if known."""
    told = dataclasses.asdict(protocol)
    if real and real.source_file:
        told |= {"data": real.source_file, "split": None}
    return {
        "space": fake.space.name,
        "space_hash": fake.space.hash,
        "resizer": fake.space.resizer,
        "image": _format_shape(fake.image_shape),
        "reals": (real.count or None) if real else None,
        "fakes": fake.count,
        **told,
        **metric.settings,
    }


def compute_feature_stats(
    images: ImageArray | SampleFn,
    *,
    space: FeatureSpace,
    metrics: Sequence[str],
    count: int | None = None,
    group: ReduceGroup = SINGLE,
    batch: int = 64,
    device: torch.device | str = "cpu",
    labels: ClassLabels = NO_LABELS,
    data_digest: str = "",
    should_abort: ShouldAbort = never_abort,
) -> FeatureStats:
    """What `metrics` need to know of real images: uint8 [N, H, W, C], or a sampler and a `count`.

    Reals that are scored against again and again are summarized once. Every rank calls this, with equal
    arguments. Of features each rank keeps its share. With `known_as`, a digest of images and labels, what can be
    kept is read from the cache, and written there. Raises `Unusable` for what are no uint8 images, for fewer than
    two, for labels that are missing, and for features that are not finite. `heed`: as in `evaluate`.
    """
    readings = unique_accumulators([get_metric(name).real_accumulators for name in metrics])
    least = len(images) if not callable(images) else DEFAULT_COUNT
    count = _check_count(least if count is None else count if callable(images) else min(count, least))
    numbers = labels.reals
    of = None if numbers is None else lambda rows: numbers[rows.start : rows.stop]
    if of is None and (lacking := [reading for reading in readings if reading.needs_labels]):
        raise UsageError(f"metrics: {lacking[0].metrics} goes class by class, and the reals have no labels")
    how = FeaturePass(space, count, batch, len(labels.names), 0, torch.device(device), should_abort)
    if data_digest and not callable(images):
        return cached_reference(images, how, readings, group, data_digest, of)
    return extract(images if callable(images) else array_sampler(images, space), how, readings, group, of)


def _check_count(count: int) -> int:
    if count < 2:
        raise UsageError(f"count: a score needs at least 2 images, not {count}; {DEFAULT_COUNT} is usual")
    return count


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
