"""Scores of a generator, each with the protocol of its measurement.

    scores = evaluate(sample, reals, space=pixels(32, 3), metrics=["fd", "prdc"], count=10_000, group=group)
    scores[0].name, scores[0].value        # "fd_pixels", 3.1

`sample` maps a range of indices to images; image i must depend on i only. Then a score does not depend on the number of
ranks or on the batch size. Two scores are comparable if `protocol_differences` is empty.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from paragan.core.errors import UsageError
from paragan.eval.accumulators import FeaturePass, PairedReals, ShouldAbort, never_abort, unique_accumulators
from paragan.eval.feature_stats import FeatureStats, ImageArray, LabelsFn, SampleFn, array_sampler, extract
from paragan.eval.features import FeatureSpace
from paragan.eval.metrics import (
    DEFAULT_COUNT,
    METRICS,
    Metric,
    MetricInputs,
    MetricValue,
    check_labels,
    check_pairs,
    get_metric,
    metric_names,
    num_fakes,
)
from paragan.eval.reference_stats import cached_reference
from paragan.eval.sharding import SINGLE, MetricFailed, ReduceGroup

Value = str | int | float | bool | None


@dataclass(frozen=True)
class EvalProtocol:
    """How fakes and reals were produced; None if unknown.

    `batch_norm` is the statistics of the generator's batch norm: "none" (it has none), "running" (from training),
    "standing" (estimated afterwards) or "batch of 64" (of each batch, so that the score depends on the batch size).
    """

    data: str | None = None  # the data set, its resolution and how it was resized
    split: str | None = None  # of the reals: train, test, all
    labels: str | None = None  # of the fakes: none, uniform, or as in the data
    batch_norm: str | None = None
    ema: bool | None = None  # whether the EMA of the generator was scored
    truncation: float | None = None  # psi; 1 for none
    seed: int = 0  # of the latents, of the subsets of kid, and of the splits of is


@dataclass(frozen=True)
class ClassLabels:
    """Labels, for per-class scores."""

    names: tuple[str, ...]  # of the classes
    reals: np.ndarray | None = None  # int64 [N]
    fakes: LabelsFn | None = None  # labels that the generator got for a range of indices


NO_LABELS = ClassLabels(())
SWEEP_FIELDS = ("truncation", "seed")  # scores that differ only in these are of one protocol


@dataclass(frozen=True)
class Score:
    """A score with its protocol and notes. One that could not be computed is NaN and has the reason as `failure`."""

    name: str
    value: float
    protocol: Mapping[str, Value]
    seconds: float  # of the pass over the images, which all scores of a call share, and of its own computation
    notes: tuple[str, ...] = ()
    error: float | None = None  # bound of the rounding error, if known
    per_class: Mapping[str, float] | None = None  # name of a class -> its value
    failure: str = ""

    @property
    def fingerprint(self) -> str:
        """12 hex digits of the protocol without truncation and seed."""
        fields = {name: value for name, value in self.protocol.items() if name not in SWEEP_FIELDS}
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]

    def to_json(self, kimg: float | None = None) -> dict[str, Any]:
        """Return a line of metrics.jsonl. `kimg` is the number of images the generator was trained on, in thousands.

        `kimg`, `notes`, `error` and `per_class` are left out if there are none.
        """
        line: dict[str, Any] = {"name": self.name, "value": None if self.failure else self.value}
        if kimg is not None:
            line["kimg"] = kimg
        line["protocol"] = dict(self.protocol)
        line["fingerprint"] = self.fingerprint
        line["seconds"] = round(self.seconds, 3)
        if self.notes:
            line["notes"] = list(self.notes)
        if self.error is not None:
            line["error"] = self.error
        if self.per_class is not None:
            line["per_class"] = dict(self.per_class)
        if self.failure:
            line["nonfinite"] = ["value"]  # as JsonlFile writes NaN
        return line


def protocol_differences(a: Score | Mapping[str, Any], b: Score | Mapping[str, Any]) -> list[str]:
    """Return the fields in which the protocols of two scores, or of their lines of metrics.jsonl, differ.

    If there are none, the scores are comparable. Truncation and seed do not count, so that the scores of one sweep are
    comparable. "name" is included if the scores have different names.
    """
    a, b = (s.to_json() if isinstance(s, Score) else s for s in (a, b))
    a_fields = {**a["protocol"], "name": a["name"]}
    b_fields = {**b["protocol"], "name": b["name"]}
    absent = object()
    fields = {*a_fields, *b_fields} - {*SWEEP_FIELDS}
    return sorted(field for field in fields if a_fields.get(field, absent) != b_fields.get(field, absent))


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
    pairs: PairedReals | None = None,
    should_abort: ShouldAbort = never_abort,
) -> list[Score]:
    """Score fakes by each of `metrics`. Every rank calls this with equal arguments and gets the same list.

    A metric that cannot be computed does not affect the others: its scores have a `failure`.

    Args:
        fakes: Maps a range of indices to images, uint8 [len, C, H, W] in [0, 255]; image i must depend on i only. Each
            rank requests its blocks of `batch` images; the blocks are the same for any number of ranks.
        reals: uint8 [N, H, W, C], or the result of `compute_feature_stats`, which saves a pass over them. None if no
            metric uses reals.
        space: Feature space.
        metrics: Keys of `METRICS`.
        protocol: How fakes and reals were produced.
        count: Number of fakes; None: what the metrics require, or 50,000.
        group: All ranks.
        batch: Images per batch.
        device: Where features are computed.
        labels: Labels of reals and fakes, for per-class metrics.
        pairs: The reals that fakes were made from, for psnr, log_mel and stft.
        should_abort: Called between blocks with the number of fakes so far.

    Raises:
        UsageError: Before any image is sampled: a metric is unknown, is not defined in `space`, contradicts `count` or
            lacks labels or pairs, or the reals do not fit. Afterwards: no metric could be computed.
        EvaluationAborted: `should_abort` returned True on all ranks.
    """
    protocol = protocol or EvalProtocol()
    names = {name: metric_names(name, space) for name in metrics}
    count = num_fakes(metrics, count)
    check_labels(metrics, space, len(labels.names) if labels.fakes else 0)
    check_pairs(metrics, pairs.sample_rate if pairs else None)
    against_reals = [name for name in metrics if METRICS[name].real_accumulators]
    start = time.perf_counter()
    options: dict[str, Any] = {"space": space, "group": group, "batch": batch, "device": device, "labels": labels}
    real = _real_stats(reals, against_reals, options) if against_reals else FeatureStats(space, (), 0, {})
    accumulators = unique_accumulators([METRICS[name].fake_accumulators for name in metrics])
    feature_pass = FeaturePass(
        space, _check_count(count), batch, len(labels.names), protocol.seed, torch.device(device), should_abort, pairs
    )
    fake = extract(fakes, feature_pass, accumulators, group, labels.fakes)
    if real.image_shape and real.image_shape != fake.image_shape:
        shapes = [_format_shape(shape) for shape in (real.image_shape, fake.image_shape)]
        raise UsageError(f"reals: images are {shapes[0]} (CxHxW), but fakes are {shapes[1]}. Use equal shapes")
    inputs = MetricInputs(real, fake, group, protocol.seed, labels.names, torch.device(device))
    return _compute_scores(names, inputs, protocol, time.perf_counter() - start)


def score_stats(
    fakes: FeatureStats,
    reals: FeatureStats | None,
    *,
    metrics: Sequence[str],
    protocol: EvalProtocol,
    classes: tuple[str, ...] = (),
    group: ReduceGroup = SINGLE,
    device: torch.device | str = "cpu",
    seconds: float = 0.0,
    on_metric: Callable[[str], object] | None = None,
) -> list[Score]:
    """Score feature stats of fakes, as `evaluate` does with images. Every rank calls this and gets the same list.

    Args:
        fakes: Result of `compute_feature_stats(..., of_fakes=True)`, or of `load_reference_stats`.
        reals: Likewise, of the same space; None if no metric uses reals.
        metrics: Keys of `METRICS`.
        protocol: How fakes and reals were produced.
        classes: Names of the classes, for per-class metrics.
        group: All ranks.
        device: Where features are.
        seconds: Duration of the passes over the images, which the scores report.
        on_metric: Called with the name of each metric before it is computed.

    Raises:
        UsageError: A metric is unknown, is not defined in the space or lacks reals; no metric could be computed.
    """
    names = {name: metric_names(name, fakes.space) for name in metrics}
    against_reals = [name for name in metrics if METRICS[name].real_accumulators]
    real = FeatureStats(fakes.space, (), 0, {})
    if against_reals:
        real = _real_stats(reals, against_reals, {"space": fakes.space})
    inputs = MetricInputs(real, fakes, group, protocol.seed, classes, torch.device(device))
    return _compute_scores(names, inputs, protocol, seconds, on_metric)


def _compute_scores(
    names: Mapping[str, Sequence[str]],
    inputs: MetricInputs,
    protocol: EvalProtocol,
    shared_s: float,
    on_metric: Callable[[str], object] | None = None,
) -> list[Score]:
    """Compute the scores of all metrics, by the names of their scores. UsageError if none can be computed."""
    scores: list[Score] = []
    for metric, score_names in names.items():
        if on_metric:
            on_metric(metric)
        scores += _scores(METRICS[metric], score_names, inputs, protocol, shared_s)
    if scores and all(score.failure for score in scores):
        raise UsageError(f"metrics={next(iter(names))}: {scores[0].failure}")
    return scores


def _scores(
    metric: Metric, names: Sequence[str], inputs: MetricInputs, protocol: EvalProtocol, shared_s: float
) -> list[Score]:
    """Compute the scores of one metric; `shared_s` is the duration of the passes over the images."""
    start = time.perf_counter()
    failure = ""
    notes: tuple[str, ...] = ()
    try:
        values = metric.compute(inputs, **metric.settings)
    except (MetricFailed, UsageError) as error:
        failure = str(error)
        notes = (f"could not be computed: {failure}",)
        values = [MetricValue(math.nan)] * len(names)
    seconds = shared_s + time.perf_counter() - start
    real = inputs.real
    fake = inputs.fake
    fields = _protocol_fields(metric, protocol, real if metric.real_accumulators else None, fake)
    if not failure:
        notes = (*metric.notes(fake.space, real, fake), *(() if metric.is_paired else fake.space.notes))
    return [
        Score(name, value.value, fields, seconds, (*value.notes, *notes), value.error, value.per_class, failure)
        for name, value in zip(names, values, strict=False)  # pr50k3_full reports only two of four values
    ]


def _real_stats(
    reals: ImageArray | FeatureStats | None, metrics: Sequence[str], options: Mapping[str, Any]
) -> FeatureStats:
    """Return feature stats of the reals for these metrics; compute them if `reals` are images."""
    if reals is None:
        raise UsageError(f"reals=None: {metrics[0]} compares with real images. Use uint8 images [N, H, W, C]")
    if not isinstance(reals, FeatureStats):
        return compute_feature_stats(reals, metrics=metrics, **options)
    if reals.space != options["space"]:
        raise UsageError(
            f"reals: their stats are of the space {reals.space.name}, not {options['space'].name}. Compute them again"
        )
    for accumulator in unique_accumulators([METRICS[name].real_accumulators for name in metrics]):
        reals.get(accumulator)
    return reals


def _protocol_fields(
    metric: Metric, protocol: EvalProtocol, real: FeatureStats | None, fake: FeatureStats
) -> dict[str, Value]:
    """Return the protocol of a score; its field `reals` is the number of reals, if known."""
    production = dataclasses.asdict(protocol)
    if real and real.source_file:
        production |= {"data": real.source_file, "split": None}
    space = {"space": fake.space.name, "space_hash": fake.space.hash, "resizer": fake.space.resizer}
    return {
        **({} if metric.is_paired else space),
        "image": _format_shape(fake.image_shape),
        "reals": (real.count or None) if real else None,
        "fakes": fake.count or None,
        **production,
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
    of_fakes: bool = False,
    seed: int = 0,
    should_abort: ShouldAbort = never_abort,
) -> FeatureStats:
    """Compute what `metrics` need of real images, once for many evaluations; or what they need of fakes.

    Every rank calls this with equal arguments, and holds its shard of the features.

    Args:
        images: uint8 [N, H, W, C], or a sampler as in `evaluate`.
        space: Feature space.
        metrics: Keys of `METRICS`.
        count: Number of images; None: all, or 50,000 of a sampler.
        group: All ranks.
        batch: Images per batch.
        device: Where features are computed.
        labels: Labels of the images, for per-class metrics.
        data_digest: Digest of images and labels. If given, results are read from the cache and written there.
        of_fakes: Collect what the metrics need of fakes; their labels are `labels.reals`.
        seed: Seed of the splits of is.
        should_abort: As in `evaluate`.

    Raises:
        UsageError: The images are not uint8 or fewer than two, labels are missing, or features are not finite.
        EvaluationAborted: `should_abort` returned True on all ranks.
    """
    side = "fakes" if of_fakes else "reals"
    accumulators = unique_accumulators([get_metric(name).accumulators_of(side) for name in metrics])
    if callable(images):
        count = DEFAULT_COUNT if count is None else count
    else:
        count = len(images) if count is None else min(count, len(images))
    feature_pass = FeaturePass(
        space, _check_count(count), batch, len(labels.names), seed, torch.device(device), should_abort
    )
    real_labels = labels.reals
    label_fn = None if real_labels is None else lambda rows: real_labels[rows.start : rows.stop]
    if label_fn is None:
        for accumulator in accumulators:
            if accumulator.needs_labels:
                raise UsageError(f"metrics={accumulator.metrics}: needs classes, and the {side} have no labels")
    if data_digest and not callable(images):
        return cached_reference(images, feature_pass, accumulators, group, data_digest, label_fn)
    sample = images if callable(images) else array_sampler(images, space)
    return extract(sample, feature_pass, accumulators, group, label_fn)


def _check_count(count: int) -> int:
    if count < 2:
        raise UsageError(f"count={count}: a score needs at least 2 images. Use 2 or more")
    return count


def _format_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
