"""Refuse two sets that cannot be compared, from what is known before an image is decoded: files, labels, headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.data.value_range import format_value
from paragan.eval import classifier
from paragan.eval.accumulators import ClassGaussianAcc, GaussianAcc
from paragan.eval.features import FeatureSpace
from paragan.eval.metrics import METRICS, metric_of_any_count
from paragan.eval.reference_stats import UNNAMED_SPACE, check_image_shape
from paragan.train.image_set import OpenedImages, OpenedSet, SizeScan, StatsFile


def check_stats_suffice(side: OpenedSet, metrics: Sequence[str], features: str) -> None:
    """Refuse metrics, features and sizes that need images where there is a file of statistics."""
    if not isinstance(side, StatsFile):
        return
    for name in metrics:
        if not {*METRICS[name].accumulators_of(side.side)} <= {GaussianAcc()}:
            raise UsageError(
                f"metrics={name}: needs images, and {side.side} {side.path} is a file of statistics (mu and sigma). "
                "Use fd, or fid if it is of Inception, or give the images"
            )
    if features == classifier.SPACE_NAME:
        raise UsageError(
            f"features={features}: is a classifier of the reals, and {side.side} {side.path} is a file of "
            "statistics. Use the space of the file, which is taken without --features"
        )


def check_counts(side: OpenedSet, metrics: Sequence[str]) -> None:
    """Refuse metrics that need more images than there are, or other numbers of them."""
    if isinstance(side, StatsFile):
        return
    count = len(side)
    for name in metrics:
        metric = METRICS[name]
        if not metric.accumulators_of(side.side):
            continue
        if side.side == "fakes" and metric.required_fakes not in (None, count):
            _raise_other_count(name, side, metric.required_fakes)
        minimum = metric.min_images_of(side.side)
        if count < minimum:
            others = _metrics_of_so_few(count)
            advice = f"Use {others}, or more images" if others else f"Use {minimum} or more"
            raise UsageError(
                f"metrics={name}: needs at least {minimum} {side.side}, and {side.location} has {count}. {advice}"
            )


def _raise_other_count(name: str, side: OpenedImages, required: int | None) -> None:
    other = metric_of_any_count(name, len(side))
    hint = f", or --count {required}" if required and len(side) > required else ""
    raise UsageError(f"metrics={name}: is of {required} fakes, and {side.location} has {len(side)}. Use {other}{hint}")


def _metrics_of_so_few(count: int) -> str:
    """Return the metrics of any space that are defined for so few images."""
    return ",".join(name for name in ("fd", "kid", "prdc") if METRICS[name].min_images_of("fakes") <= count)


def match_classes(
    real: OpenedSet, fake: OpenedSet, metrics: Sequence[str]
) -> tuple[OpenedSet, OpenedSet, tuple[str, ...]]:
    """Return both sides and the names of the classes of the reals, by which the fakes are labelled too.

    Names match names, in any order; numbers match the positions of names.
    """
    per_class = [name for name in metrics if METRICS[name].needs_labels]
    if not isinstance(real, OpenedImages) or not isinstance(fake, OpenedImages):
        return real, fake, ()  # no metric of theirs needs labels
    for side in (real, fake) if per_class else (real,):
        if side.labels is None:
            subject = f"metrics={per_class[0]}" if per_class else f"features={classifier.SPACE_NAME}"
            raise UsageError(
                f"{subject}: needs classes, and {side.side} {side.location} have none. "
                "Use fd, kid or prdc with other features, or images with labels"
            )
    if not per_class or fake.labels is None or real.labels is None:
        return real, dataclasses.replace(fake, labels=None), real.classes
    numbers = _class_numbers(real.classes, fake.classes)
    if numbers is None:
        raise UsageError(
            f"metrics={per_class[0]}: goes class by class, and {fake.location} has other classes "
            f"({_list_names(fake.classes)}) than {real.location} ({_list_names(real.classes)}). Use fd, kid or prdc"
        )
    fake = dataclasses.replace(fake, labels=np.array(numbers)[fake.labels], classes=real.classes)
    for side in (real, fake):
        _check_class_sizes(side, per_class)
    return real, fake, real.classes


def _check_class_sizes(side: OpenedImages, per_class: Sequence[str]) -> None:
    """Refuse distances within classes if no class has two images."""
    if side.labels is None or np.bincount(side.labels).max() >= 2:
        return
    for name in per_class:
        if ClassGaussianAcc() in METRICS[name].accumulators_of(side.side):
            raise UsageError(
                f"metrics={name}: no class of {side.side} {side.location} has two images, which a distance within "
                "classes needs. Use fd, kid or prdc"
            )


def _class_numbers(reals: tuple[str, ...], fakes: tuple[str, ...]) -> list[int] | None:
    """Return the class of the reals of each class of the fakes; None if they do not match."""
    if set(fakes) <= set(reals):
        return [reals.index(name) for name in fakes]
    are_positions = reals == tuple(map(str, range(len(reals))))
    if are_positions and len(fakes) == len(reals):
        return list(range(len(reals)))
    is_named = not any(name.isdecimal() for name in reals)
    if (is_named or are_positions) and all(name.isdecimal() and int(name) < len(reals) for name in fakes):
        return [int(name) for name in fakes]
    return None


def _list_names(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > 5 else ""
    return f"{len(names)}: {', '.join(names[:5])}{more}"


def choose_size(
    sides: Sequence[OpenedSet], scans: Sequence[SizeScan], resolution: int | str, channels: int
) -> tuple[int | str, int]:
    """Return resolution and channels of both sets; (0, 0) for numbers and files of statistics."""
    images = [side for side in sides if isinstance(side, OpenedImages)]
    if len({side.is_array for side in images}) > 1:
        kinds = [f"{side.side} {side.location} are {'numbers' if side.is_array else 'images'}" for side in images]
        raise UsageError(f"reals, fakes: {' and '.join(kinds)}. Use two sets of one kind")
    if not scans:
        if resolution or channels:
            raise UsageError("resolution, channels: these sets hold no images. Leave --resolution and --channels out")
        _check_equal_records(images)
        return 0, 0
    images = [side for side in images if not side.is_array]
    found_channels = {1 if scan.is_grey else 3 for scan in scans}
    differ_in_color = len(found_channels) > 1 and not channels
    if not resolution:
        _check_equal_sizes(
            images, scans, ", and --channels 3 or 1, since colour differs too" if differ_in_color else ""
        )
    if differ_in_color:
        colors = [f"{side.location} is {'grey' if scan.is_grey else 'RGB'}" for side, scan in zip(images, scans)]
        raise UsageError(
            f"reals, fakes: {' and '.join(colors)}. Use --channels 3 to repeat grey to RGB, or --channels 1 to reduce "
            "colour to grey"
        )
    return resolution or ImageSize(*scans[0].smallest).resolution, channels or found_channels.pop()


def _check_equal_records(sides: Sequence[OpenedImages]) -> None:
    shapes = {side.source.array.shape[1:] for side in sides if side.source.array is not None}
    if len(shapes) > 1:
        names = [f"{list(shape)}" for shape in sorted(shapes)]
        raise UsageError(f"reals, fakes: records are of shapes {' and '.join(names)}. Use records of one shape")


def _check_equal_sizes(sides: Sequence[OpenedImages], scans: Sequence[SizeScan], other_advice: str) -> None:
    """Refuse images of several sizes: nothing is resized in silence."""
    smallest = min(length for scan in scans for length in (*scan.smallest, *scan.largest))
    advice = (
        f"Use --resolution {smallest}, which crops every image of both sets to the largest centred square and resizes "
        f"it with Lanczos{other_advice}"
    )
    for side, scan in zip(sides, scans):
        if scan.smallest != scan.largest:
            sizes = f"{_format_size(scan.smallest)} to {_format_size(scan.largest)}"
            raise UsageError(f"{side.side}: images in {side.location} are of several sizes, {sizes}. {advice}")
    sizes = [f"{side.location} has {_format_size(scan.smallest)}" for side, scan in zip(sides, scans)]
    if len({scan.smallest for scan in scans}) > 1:
        raise UsageError(f"reals, fakes: images differ in size: {' and '.join(sizes)}. {advice}")


def check_equal_ranges(real: OpenedSet, fake: OpenedSet) -> None:
    """Refuse images with more than 8 bits whose values would become pixels in two ways."""
    ranges = {
        side.location: side.value_range
        for side in (real, fake)
        if isinstance(side, OpenedImages) and side.value_range is not None
    }
    if len(set(ranges.values())) > 1:
        found = " and ".join(f"{location} has {value_range}" for location, value_range in ranges.items())
        low = min(value_range.low for value_range in ranges.values())
        high = max(value_range.high for value_range in ranges.values())
        common = f"{format_value(low)}:{format_value(high)}"
        raise UsageError(f"range=auto: values differ in range: {found}. Use --range={common} for both")


def _format_size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def check_stats_file(file: StatsFile, space: FeatureSpace, image_shape: tuple[int, ...]) -> None:
    """Refuse statistics of another space, or of images of another shape."""
    check_image_shape(file.stats, file.path, image_shape, file.side)
    is_other = file.space.hash != space.hash and file.space.name != UNNAMED_SPACE
    if is_other or file.space.num_features != space.num_features:
        raise UsageError(
            f"{file.side}: {file.path} has {file.space.num_features} features of the space {file.space.name}, and the "
            f"others {space.num_features} of {space.name}. Use files and --features of one space"
        )
