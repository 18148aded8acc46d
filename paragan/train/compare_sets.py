"""Compare two sets of images, or files of their statistics: Fréchet distance, KID, precision and recall, ...

    scores = compare("photos/", "samples.npz", ["fd", "kid", "prdc"])
    scores[0].name, scores[0].value        # "fd_pixels", 3.1

Whatever can be known before features are computed is checked before: metrics, counts, labels, sizes, channels, spaces.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paragan.core.devices import pick_device
from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.data.value_range import AUTO, RangeOption, parse_range
from paragan.eval import classifier
from paragan.eval.accumulators import GaussianAcc
from paragan.eval.evaluate import ClassLabels, EvalProtocol, Score, compute_feature_stats, score_stats
from paragan.eval.feature_stats import FeatureStats
from paragan.eval.features import FeatureSpace, named_space, raw_values, space_from_module
from paragan.eval.frechet import Gaussian
from paragan.eval.inception import NUM_FEATURES
from paragan.eval.metrics import METRICS, check_labels, get_metric, metric_names, required_features
from paragan.eval.reference_stats import UNNAMED_SPACE, is_reference_stats, load_reference_stats, recorded_space
from paragan.eval.sharding import SINGLE, ReduceGroup
from paragan.train.image_set import (
    ImageContent,
    ImageSet,
    OpenedImages,
    OpenedSet,
    Side,
    StatsFile,
    open_image_set,
    read_image_set,
    scan_sizes,
)
from paragan.train.set_compatibility import (
    check_counts,
    check_equal_ranges,
    check_stats_file,
    check_stats_suffice,
    choose_size,
    match_classes,
)

BLOCK_IMAGES = 64  # images of a forward pass
AS_STORED = "as they are"
SetProgressFn = Callable[[Side, int, int], object]  # side, images done, images in all


@dataclass(frozen=True)
class ComparisonOptions:
    """Options of a comparison of two sets.

    metrics    : keys of METRICS
    features   : pixels, inception, resnet20 or module:callable; "": what metrics and files of statistics need, or
                 pixels
    inception  : file of the Inception weights; "": the default path
    resolution : both sets are cropped to this shape (one number: squares) and resized with Lanczos; 0: both are used as
                 they are
    channels   : 1 grey, 3 RGB; 0: those of both sets
    range      : the stored values that become black and white, of images with more than 8 bits: `data.range`
    count      : number of fakes, evenly spaced; 0: all
    seed       : of the subsets of kid and of the splits of is
    """

    metrics: tuple[str, ...] = ("fd", "kid", "prdc")
    features: str = ""
    inception: str = ""
    resolution: int | str = 0
    channels: int = 0
    count: int = 0
    seed: int = 0
    range: str = AUTO


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two sets that were checked and can be scored.

    space   : of the features; a classifier in it is not trained yet
    classes : names of the classes of both sets, if a metric needs them
    notes   : lines for people
    """

    reals: ImageSet | StatsFile
    fakes: ImageSet | StatsFile
    space: FeatureSpace
    classes: tuple[str, ...]
    options: ComparisonOptions
    notes: tuple[str, ...] = ()

    def describe(self) -> list[str]:
        """Return lines for people: what is compared, and by which features."""
        lines = [f"{side.side}: {_describe_side(side)} ({side.location})" for side in (self.reals, self.fakes)]
        resizer = "" if self.space.resizer == "none" else f", images resized by {self.space.resizer}"
        return [*lines, *self.notes, f"features: {self.space.name}, {self.space.num_features:,} a record{resizer}"]

    def to_json(self, scores: Sequence[Score]) -> dict[str, Any]:
        """Return sets and scores as plain data; the scores are as in metrics.jsonl."""
        sides = {
            side.side: {"path": side.location, "content": _describe_side(side), "fingerprint": side.fingerprint}
            for side in (self.reals, self.fakes)
        }
        return {**sides, "notes": list(self.notes), "scores": [score.to_json() for score in scores]}


def compare(
    reals: ImageContent,
    fakes: ImageContent,
    metrics: Sequence[str] = ("fd", "kid", "prdc"),
    *,
    features: str = "",
    inception: str = "",
    resolution: int | str = 0,
    channels: int = 0,
    count: int = 0,
    seed: int = 0,
    value_range: str = AUTO,
    device: str = "auto",
) -> list[Score]:
    """Score fakes against reals. `paragan eval --reals A --fakes B` does the same, also on several ranks.

    Args:
        reals: A path or address as `--data` accepts it, an npz with mu and sigma, an array uint8 [N, H, W, C] or
            float [N, ...], or a `Dataset`.
        fakes: Likewise.
        metrics: fd, kid, prdc, ... (docs/scores.md lists them).
        features: pixels, inception, resnet20 or module:callable; "": what the metrics need, or pixels.
        inception: File of the Inception weights.
        resolution: Crop both sets to squares of this side, or to "WIDTHxHEIGHT", and resize them; 0: use them as they
            are.
        channels: 1 (grey) or 3 (RGB); 0: those of both sets.
        count: Number of fakes, evenly spaced; 0: all.
        seed: Seed of the subsets of kid and of the splits of is.
        value_range: Stored values that become black and white in images with more than 8 bits: auto, full or MIN:MAX.
        device: cpu, cuda, xpu, mps or auto.

    Returns:
        The scores, each with its protocol.

    Raises:
        UsageError: before features are computed: a set cannot be read, the sets differ in size or channels, or a metric
            is unknown, needs more images or labels, or is not possible with a file of statistics.
    """
    names = metrics.split(",") if isinstance(metrics, str) else metrics
    options = ComparisonOptions(tuple(names), features, inception, resolution, channels, count, seed, value_range)
    return score_comparison(prepare_comparison(reals, fakes, options), device=pick_device(device))


def prepare_comparison(reals: ImageContent, fakes: ImageContent, options: ComparisonOptions) -> Comparison:
    """Open and check both sets, and read them. Raises UsageError as `compare` does."""
    metrics = [get_metric(name) for name in options.metrics]
    if not metrics:
        raise UsageError("metrics=: there is none. Use fd,kid,prdc")
    for name, metric in zip(options.metrics, metrics, strict=True):
        if metric.is_paired:
            raise UsageError(
                f"metrics={name}: compares what a model makes of a real with it, and two sets have no such pairs. "
                "Use fd,kid,prdc, or paragan eval RUN_DIR"
            )
    if options.channels not in (0, 1, 3):
        raise UsageError(f"channels={options.channels}: not possible. Use 1 (grey) or 3 (RGB)")
    if options.inception and options.features not in ("", "inception"):
        raise UsageError(
            f"inception={options.inception}: is not used by features={options.features}. Leave one of them out"
        )
    with_labels = any(metric.needs_labels for metric in metrics) or options.features == classifier.SPACE_NAME
    value_range = parse_range(options.range)
    real = _open_side("reals", reals, with_labels, value_range)
    fake = _open_side("fakes", fakes, with_labels, value_range, options.count)
    for side in (real, fake):
        check_stats_suffice(side, options.metrics, options.features)
        check_counts(side, options.metrics)
    classes: tuple[str, ...] = ()
    if with_labels:
        real, fake, classes = match_classes(real, fake, options.metrics)
    sizes = [scan_sizes(side) for side in (real, fake) if isinstance(side, OpenedImages) and not side.is_array]
    resolution, channels = choose_size([real, fake], sizes, options.resolution, options.channels)
    check_equal_ranges(real, fake)
    space = _make_space(real, fake, resolution, channels, options)
    for name in options.metrics:
        metric_names(name, space)
    check_labels(options.metrics, space, len(classes))
    size = ImageSize.of(resolution)
    crop = "square crop" if size.is_square else "centre crop"
    preprocessing = f"{crop}, Lanczos to {size.width} x {size.height}" if options.resolution else AS_STORED
    for side in (real, fake):
        if isinstance(side, StatsFile):
            check_stats_file(side, space, (channels, size.height, size.width) if sizes else ())
    sides = [
        read_image_set(side, resolution, channels, preprocessing) if isinstance(side, OpenedImages) else side
        for side in (real, fake)
    ]
    notes = [f"{side.side}: {note}" for side in (real, fake) if isinstance(side, OpenedImages) for note in side.notes]
    notes += [note for scan in sizes for note in scan.notes]
    return Comparison(sides[0], sides[1], space, classes, options, tuple(notes))


def score_comparison(
    comparison: Comparison,
    group: ReduceGroup = SINGLE,
    device: torch.device | str = "cpu",
    on_progress: SetProgressFn | None = None,
    on_metric: Callable[[str], object] | None = None,
) -> list[Score]:
    """Compute the scores. Every rank calls this with equal arguments and gets the same list.

    Args:
        comparison: from `prepare_comparison`.
        group: all ranks.
        device: where features are computed.
        on_progress: called with side, images done and images in all.
        on_metric: called with the name of each metric before it is computed.

    Raises:
        UsageError: no score could be computed, or features are not finite.
    """
    options = comparison.options
    reals = comparison.reals
    space = comparison.space
    start = time.perf_counter()
    if space.name == classifier.SPACE_NAME and isinstance(reals, ImageSet):
        key = reals.cache_key or reals.fingerprint
        space = classifier.classifier_space(
            reals.images, reals.labels, comparison.classes, data_digest=key, group=group, device=device
        )
    uses_reals = any(METRICS[name].real_accumulators for name in options.metrics)
    real_stats = _side_stats(reals, space, comparison, group, device, on_progress) if uses_reals else None
    fake_stats = _side_stats(comparison.fakes, space, comparison, group, device, on_progress)
    data = None
    if isinstance(reals, ImageSet):
        data = f"{reals.fingerprint} {'x'.join(map(str, reals.images.shape[1:]))}, {reals.preprocessing}"
    scores = score_stats(
        fake_stats,
        real_stats,
        metrics=options.metrics,
        protocol=EvalProtocol(data=data, split="all", seed=options.seed),
        classes=comparison.classes,
        group=group,
        device=device,
        seconds=time.perf_counter() - start,
        on_metric=on_metric,
    )
    notes = _unnamed_space_notes(comparison)
    return [dataclasses.replace(score, notes=(*score.notes, *notes)) for score in scores]


def _side_stats(
    side: ImageSet | StatsFile,
    space: FeatureSpace,
    comparison: Comparison,
    group: ReduceGroup,
    device: torch.device | str,
    on_progress: SetProgressFn | None,
) -> FeatureStats:
    """Return what the metrics need of one side: from its file, from the cache, or computed now."""
    if isinstance(side, StatsFile):
        gaussian: Gaussian = side.stats.get(GaussianAcc())
        on_device = Gaussian(gaussian.count, gaussian.mean.to(device), gaussian.covariance.to(device))
        return dataclasses.replace(side.stats, space=space, results={GaussianAcc(): on_device})
    count = len(side.images)

    def show_progress(done: int) -> bool:
        if on_progress:
            on_progress(side.side, done, count)
        return False  # never aborts

    return compute_feature_stats(
        side.images,
        space=space,
        metrics=comparison.options.metrics,
        group=group,
        batch=BLOCK_IMAGES,
        device=device,
        labels=ClassLabels(comparison.classes, side.labels),
        data_digest=side.cache_key,
        of_fakes=side.side == "fakes",
        seed=comparison.options.seed,
        should_abort=show_progress,
    )


def _open_side(
    side: Side, content: ImageContent, with_labels: bool, value_range: RangeOption, count: int = 0
) -> OpenedSet:
    if not isinstance(content, str | Path) or not is_reference_stats(content):
        return open_image_set(side, content, with_labels, count, value_range)
    if count:
        raise UsageError(f"count={count}: {side} {content} is a file of statistics, of no images. Leave --count out")
    path = Path(content).expanduser()
    with path.open("rb") as file:
        fingerprint = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    return StatsFile(side, path, load_reference_stats(path, recorded_space(path, side), field=side), fingerprint)


# features -----------------------------------------------------------------------------------------------


def _make_space(
    real: OpenedSet,
    fake: OpenedSet,
    resolution: int | str,
    channels: int,
    options: ComparisonOptions,
) -> FeatureSpace:
    """Return the space that the user names, or that metrics or files of statistics need. No classifier is trained."""
    arrays = [side for side in (real, fake) if isinstance(side, OpenedImages) and side.is_array]
    if arrays and arrays[0].source.array is not None:
        if options.features not in ("", "values", "pixels"):
            raise UsageError(f"features={options.features}: needs images, and the sets are numbers. Use values")
        return raw_values(arrays[0].source.array.shape[1:])
    files = [side for side in (real, fake) if isinstance(side, StatsFile)]
    name = options.features
    if not name and len(files) == 2:
        return next((file.space for file in files if file.space.name != UNNAMED_SPACE), files[0].space)
    if not name and not options.inception and files:
        name = _features_of_file(files[0])
    if not name:
        name = required_features(options.metrics, options.inception)
    if name == classifier.SPACE_NAME and isinstance(real, OpenedImages):
        return classifier.untrained_space(real.labels, real.classes)
    if ":" in name:
        if not resolution:
            raise UsageError(f"features={name}: is for images, and both sets are files of statistics. Leave it out")
        size = ImageSize.of(resolution)
        return space_from_module(name, (channels, size.height, size.width))
    if not resolution and name == "pixels":
        raise UsageError("features=pixels: both sets are files of statistics, of no known size. Leave --features out")
    return named_space(name, resolution, channels, options.inception or None)


def _features_of_file(file: StatsFile) -> str:
    """Return the feature space of a file of statistics; those of other programs are of Inception."""
    if file.space.name != UNNAMED_SPACE:
        return file.space.name
    return "inception" if file.space.num_features == NUM_FEATURES else "pixels"


def _unnamed_space_notes(comparison: Comparison) -> tuple[str, ...]:
    """Note that other programs resize images in other ways, where a file does not say."""
    files = [side for side in (comparison.reals, comparison.fakes) if isinstance(side, StatsFile)]
    unnamed = [file.path.name for file in files if file.space.name == UNNAMED_SPACE]
    if not unnamed:
        return ()
    return (f"{', '.join(unnamed)}: of unknown features and resizing, which may differ",)


def _describe_side(side: ImageSet | StatsFile) -> str:
    if isinstance(side, ImageSet):
        return side.describe()
    of_images = f" of {side.stats.count:,} images" if side.stats.count else ""
    return f"mu and sigma{of_images}, {side.space.num_features:,} features"
