"""Inspect a data set by decoding every image: `paragan data inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.data.bad_samples import MAX_BAD_FRACTION
from paragan.data.dataset import (
    MAX_AUTO_CACHE_BYTES,
    HeaderScan,
    check_channels_available,
    choose_resolution,
    describe_channels,
    describe_classes,
    header_sample,
    scan_values,
)
from paragan.data.decode import DecodeFailure, read_header
from paragan.data.source import DecodeError, Source
from paragan.data.tools.image_info import ImageInfo, detect_format, inspect_image
from paragan.data.tools.parallel_map import ProgressFn, ordered_parallel_map
from paragan.data.value_range import AUTO, ValueRange, ValueScan, parse_range

UNREADABLE = "unreadable"  # the format of a file that cannot be read at all

_MAX_LISTED_BAD = 10


@dataclass(frozen=True, eq=False)
class DatasetReport:
    """Properties of a data set.

    sizes             : [N, 2] int32 width, height after EXIF rotation; 0 for bad images
    format_counts     : format -> images
    bad_format_counts : format -> bad images
    mode_counts       : colour mode -> good images
    num_rotated       : images rotated or flipped by EXIF
    num_with_alpha    : images with a pixel that is not opaque
    is_flat           : [N] bool, almost constant
    duplicates        : groups of two or more indices of images with equal pixels
    bad_reasons       : index -> reason
    nbytes            : of all good images, encoded
    size              : that training would use
    channels          : that training would use
    value_range       : the stored values that become 0 and 255; None for 8-bit images
    range_notes       : lines about it for people
    """

    source: Source
    sizes: np.ndarray
    format_counts: Counter[str]
    bad_format_counts: Counter[str]
    mode_counts: Counter[str]
    num_rotated: int
    num_with_alpha: int
    is_flat: np.ndarray
    duplicates: tuple[np.ndarray, ...]
    bad_reasons: dict[int, str]
    nbytes: int
    size: ImageSize
    channels: int
    value_range: ValueRange | None
    range_notes: tuple[str, ...]

    @property
    def good_indices(self) -> np.ndarray:
        """Indices [n] of the images that can be decoded."""
        return np.flatnonzero(self.sizes[:, 0])

    @property
    def conflicting_duplicates(self) -> list[np.ndarray]:
        """The groups of duplicates with different labels."""
        labels = self.source.labels
        return [] if labels is None else [group for group in self.duplicates if len(set(labels[group])) > 1]

    @property
    def resolution(self) -> int | str:
        """Return the value of `data.resolution` for the size."""
        return self.size.resolution

    @property
    def training_bytes(self) -> int:
        """Memory that the pixels take in training."""
        return len(self.source) * self.size.pixels * self.channels

    @property
    def in_memory(self) -> bool:
        """Whether training caches the pixels in memory by default."""
        return self.source.is_local and self.training_bytes <= MAX_AUTO_CACHE_BYTES

    def to_lines(self) -> list[str]:
        """Return the report as lines for people."""
        good = self.good_indices
        per_image = _format_bytes(self.nbytes / len(good))
        rows = [
            ("images", f"{len(self.source):,}, {_format_bytes(self.nbytes)} ({per_image} an image)"),
            ("formats", self._describe_formats()),
            ("colours", _format_counts(self.mode_counts)),
            *(("range", note) for note in self.range_notes),
            ("sizes", _format_sizes(self.sizes[good])),
            ("EXIF", f"{self.num_rotated:,} rotated upright" if self.num_rotated else ""),
            ("alpha", self._describe_alpha()),
            ("classes", describe_classes(self.source.labels, self.source.classes).removeprefix("no classes") or "none"),
            ("copies", self._describe_duplicates()),
            ("labels", self._describe_conflicts()),
            ("constant", self._describe_flat()),
            ("training", self._describe_training()),
            *(("note", note) for note in self.source.notes),
            ("bad", self._describe_bad()),
        ]
        return [f"{name:<9} {text}" for name, text in rows if text] + self._bad_lines()

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data, with names of images rather than indices."""
        name = self.source.sample_name
        sizes, counts = np.unique(self.sizes[self.good_indices], axis=0, return_counts=True)
        class_counts: dict[str, int] | None = None
        if self.source.labels is not None:
            images_per_class = np.bincount(self.source.labels, minlength=len(self.source.classes))
            class_counts = dict(zip(self.source.classes, images_per_class.tolist()))
        return {
            "location": self.source.location,
            "images": len(self.source),
            "bytes": self.nbytes,
            "formats": dict(self.format_counts),
            "bad_formats": dict(self.bad_format_counts),
            "colours": dict(self.mode_counts),
            "range": self.value_range.option if self.value_range else None,
            "sizes": [[*size, count] for size, count in zip(sizes.tolist(), counts.tolist())],
            "rotated": self.num_rotated,
            "transparent": self.num_with_alpha,
            "classes": class_counts,
            "copies": [[name(int(index)) for index in group] for group in self.duplicates],
            "copies_of_several_labels": [
                [name(int(index)) for index in group] for group in self.conflicting_duplicates
            ],
            "constant": [name(int(index)) for index in np.flatnonzero(self.is_flat)],
            "training": {
                "resolution": self.resolution,
                "channels": self.channels,
                "bytes": self.training_bytes,
                "in_memory": self.in_memory,
            },
            "notes": [*self.range_notes, *self.source.notes],
            "bad": [{"name": name(index), "reason": reason} for index, reason in self.bad_reasons.items()],
        }

    def _describe_formats(self) -> str:
        bad = {name: f" ({count:,} bad)" for name, count in self.bad_format_counts.items()}
        return ", ".join(f"{name} {count:,}{bad.get(name, '')}" for name, count in self.format_counts.most_common())

    def _describe_alpha(self) -> str:
        if not self.num_with_alpha:
            return ""
        use = "the fourth channel" if self.channels == 4 else "composited on white"
        return f"{self.num_with_alpha:,} with transparency, {use}"

    def _describe_duplicates(self) -> str:
        if not self.duplicates:
            return "none"
        originals = len(self.duplicates)
        copies = sum(map(len, self.duplicates)) - originals
        copies_text = "exact copy" if copies == 1 else "exact copies"
        originals_text = "image" if originals == 1 else "images"
        example = self._format_names(self.duplicates[0])
        return f"{copies:,} {copies_text} of {originals:,} {originals_text}, such as {example}"

    def _describe_conflicts(self) -> str:
        conflicts = self.conflicting_duplicates
        if not conflicts:
            return ""
        example = self._format_names(conflicts[0])
        images = "1 image has" if len(conflicts) == 1 else f"{len(conflicts):,} images have"
        return f"{images} copies in several classes, such as {example}"

    def _describe_flat(self) -> str:
        flat = np.flatnonzero(self.is_flat)
        return f"{len(flat):,} almost constant, such as {self._format_names(flat[:1])}" if len(flat) else "none"

    def _describe_training(self) -> str:
        cache = "cached in memory" if self.in_memory else "decoded when needed"
        line = f"{self.size}, {describe_channels(self.channels)}; {_format_bytes(self.training_bytes)}, {cache}"
        if len(self.bad_reasons) <= MAX_BAD_FRACTION * len(self.source):
            return line
        return (
            f"{line}; training does not accept it, since more than {MAX_BAD_FRACTION:.0%} are bad "
            "(--data.max_bad_fraction)"
        )

    def _describe_bad(self) -> str:
        return f"{len(self.bad_reasons):,} of {len(self.source):,} cannot be decoded" if self.bad_reasons else "none"

    def _bad_lines(self) -> list[str]:
        listed = [*self.bad_reasons.items()][:_MAX_LISTED_BAD]
        lines = [f"  {self.source.sample_name(index)}: {reason}" for index, reason in listed]
        more = len(self.bad_reasons) - len(listed)
        if more:
            lines.append(f"  and {more:,} more (--json FILE lists them)")
        return lines

    def _format_names(self, group: np.ndarray) -> str:
        return " = ".join(self.source.sample_name(int(index)) for index in group[:2])


def inspect_dataset(
    source: Source,
    resolution: int | str | None = None,
    channels: int | None = None,
    value_range: str = AUTO,
    progress: ProgressFn | None = None,
) -> DatasetReport:
    """Read and decode every image once. Uses some 40 bytes of memory an image.

    Args:
        source: the images.
        resolution, channels, value_range: that training would be asked for; the defaults are those of `load_data`.
        progress: is called with the number of images done, and of all.

    Raises:
        UsageError: no image can be decoded, they do not have so many channels, or the range is wrong or not certain.
    """
    found_range = (scan := scan_values(source)).resolve(parse_range(value_range))
    sizes = np.zeros((len(source), 2), np.int32)
    is_flat = np.zeros(len(source), bool)
    is_grey = np.zeros(len(source), bool)
    digests = np.zeros(len(source), "S16")
    format_counts = Counter[str]()
    bad_format_counts = Counter[str]()
    mode_counts = Counter[str]()
    num_rotated = num_with_alpha = nbytes = 0
    bad_reasons: dict[int, str] = {}
    for index, (file_format, info) in enumerate(_inspect_records(source, found_range, progress)):
        format_counts[file_format] += 1
        if isinstance(info, str):
            bad_reasons[index] = info
            bad_format_counts[file_format] += 1
            continue
        sizes[index] = info.width, info.height
        is_flat[index] = info.is_flat
        is_grey[index] = info.is_grey
        digests[index] = info.digest
        mode_counts[info.mode] += 1
        num_rotated += info.is_rotated
        num_with_alpha += info.has_alpha
        nbytes += info.nbytes
    sample = _good_sample(source, sizes[:, 0] > 0, bad_reasons)
    size, depth = _training_shape(source, sample, sizes, is_grey, num_with_alpha, resolution, channels)
    return DatasetReport(
        source=source,
        sizes=sizes,
        format_counts=format_counts,
        bad_format_counts=bad_format_counts,
        mode_counts=mode_counts,
        num_rotated=num_rotated,
        num_with_alpha=num_with_alpha,
        is_flat=is_flat,
        duplicates=_group_duplicates(digests, np.flatnonzero(sizes[:, 0])),
        bad_reasons=bad_reasons,
        nbytes=nbytes,
        size=size,
        channels=depth,
        value_range=found_range,
        range_notes=tuple(scan.describe(found_range)),
    )


def _training_shape(
    source: Source,
    sample: np.ndarray,
    sizes: np.ndarray,
    is_grey: np.ndarray,
    num_with_alpha: int,
    resolution: int | str | None,
    channels: int | None,
) -> tuple[ImageSize, int]:
    """Return the size and the channels that training would use, if it is asked for these or leaves them out."""
    is_all_grey = bool(is_grey[sample].all())
    bands = frozenset[int]()
    if detect_format(record := source.read(int(sample[0]))) == "pixels":
        bands = frozenset([read_header(record).bands])
    depth = channels or (1 if is_all_grey else 3)
    check_channels_available(
        source, HeaderScan(sizes[sample], is_all_grey, ValueScan(), bands=bands, num_alpha=num_with_alpha), depth
    )
    return ImageSize.of(choose_resolution(sizes[sample]) if resolution is None else resolution), depth


def _good_sample(source: Source, is_good: np.ndarray, bad_reasons: dict[int, str]) -> np.ndarray:
    """Return the indices [n] of good images from which training would choose resolution and channels."""
    if not is_good.any():
        raise UsageError(no_good_image_message(source, bad_reasons))
    sample = header_sample(source)
    return sample[is_good[sample]] if is_good[sample].any() else np.flatnonzero(is_good)


def no_good_image_message(source: Source, bad_reasons: dict[int, str]) -> str:
    """Return the message for a data set of which no image can be decoded."""
    index, reason = next(iter(bad_reasons.items()))
    example = f"such as {source.sample_name(index)}: {reason}"
    return f"data: none of the {len(source):,} images of {source.location} can be decoded, {example}"


def _inspect_records(
    source: Source, value_range: ValueRange | None, progress: ProgressFn | None
) -> Iterator[tuple[str, ImageInfo | str]]:
    """Yield the format of every image, and its properties or why it is bad."""

    def inspect(index: int) -> tuple[str, ImageInfo | str]:
        return _inspect_record(source, index, value_range)

    for result in ordered_parallel_map(len(source), inspect, is_local=source.is_local, progress=progress):
        yield (UNREADABLE, result.reason) if isinstance(result, DecodeFailure) else result


def _inspect_record(source: Source, index: int, value_range: ValueRange | None) -> tuple[str, ImageInfo | str]:
    """Return the format of an image, and its properties or why it is bad. Raises `DecodeError` if it cannot be read."""
    record = source.read(index)
    try:
        return detect_format(record), inspect_image(record, value_range)
    except DecodeError as error:
        return detect_format(record), str(error)


def _group_duplicates(digests: np.ndarray, good: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the groups of two or more images of equal digest, in the order of the data set."""
    order = good[np.argsort(digests[good], kind="stable")]
    starts = np.flatnonzero(np.append(True, digests[order][1:] != digests[order][:-1]))
    ends = np.append(starts[1:], len(order))
    groups = [order[start:end] for start, end in zip(starts, ends) if end - start > 1]
    return tuple(sorted(groups, key=lambda group: int(group[0])))


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def _format_sizes(sizes: np.ndarray) -> str:
    """Describe widths and heights [n, 2]."""
    unique = np.unique(sizes, axis=0)
    if len(unique) == 1:
        return f"all {_format_size(unique[0])}"
    by_area = sizes[np.argsort(sizes.astype(np.int64).prod(axis=1), kind="stable")]
    size_range = f"{_format_size(by_area[0])} to {_format_size(by_area[-1])}"
    median = _format_size(by_area[len(by_area) // 2])
    num_not_square = int((sizes[:, 0] != sizes[:, 1]).sum())
    return f"{len(unique):,}, {size_range}, median {median}; {num_not_square:,} not square"


def _format_size(size: Sequence[int] | np.ndarray) -> str:
    return f"{size[0]} x {size[1]}"


def _format_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if round(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
