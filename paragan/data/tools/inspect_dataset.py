"""What a set of images is, every one of them decoded: `paragan data inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.dataset import MAX_AUTO_CACHE_BYTES, choose_resolution, describe_classes, header_sample
from paragan.data.decode import DecodeFailure
from paragan.data.source import DecodeError, Source
from paragan.data.tools.image_info import ImageInfo, detect_format, inspect_image
from paragan.data.tools.parallel_map import ProgressFn, ordered_parallel_map

MAX_BAD_FRACTION = 0.01  # more than this, and training refuses the set unless told otherwise

UNREADABLE = "unreadable"  # the format of what cannot even be read

_MAX_LISTED_BAD = 10  # bad images on a screen


@dataclass(frozen=True, eq=False)
class DatasetReport:
    """What was found.

    sizes  : [N, 2] int32 width, height, upright; 0 where bad
    forms, bad_forms : how many files of which format, and how many of them are bad
    modes  : how many good images of which colours
    turned, clear : how many are turned by EXIF, how many have a pixel that is not opaque
    flat   : [N] bool, next to constant
    copies : groups of indices of equal pixels, each of two or more
    bad    : index -> reason
    nbytes : of all good images, as they lie there
    resolution, channels : what training would take; `held` whether in memory
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
    resolution: int
    channels: int

    @property
    def good_indices(self) -> np.ndarray:
        """[n] the indices of images that can be decoded."""
        return np.flatnonzero(self.sizes[:, 0])

    @property
    def conflicting_duplicates(self) -> list[np.ndarray]:
        """Those groups of copies whose labels differ."""
        labels = self.source.labels
        return [] if labels is None else [group for group in self.duplicates if len(set(labels[group])) > 1]

    @property
    def training_bytes(self) -> int:
        """What training takes to hold all."""
        return len(self.source) * self.resolution**2 * self.channels

    @property
    def in_memory(self) -> bool:
        return self.source.is_local and self.training_bytes <= MAX_AUTO_CACHE_BYTES

    def to_lines(self) -> list[str]:
        """For people."""
        good = self.good_indices
        rows = [
            (
                "images",
                f"{len(self.source):,}, {_format_bytes(self.nbytes)} ({_format_bytes(self.nbytes / len(good))} an image)",
            ),
            ("formats", self._describe_formats()),
            ("colours", _format_counts(self.mode_counts)),
            ("sizes", _format_sizes(self.sizes[good])),
            ("EXIF", f"{self.num_rotated:,} turned upright" if self.num_rotated else ""),
            ("alpha", f"{self.num_with_alpha:,} with transparency, composited on white" if self.num_with_alpha else ""),
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
        """All of it, by name rather than by index."""
        name, labels, classes = self.source.sample_name, self.source.labels, self.source.classes
        sizes, counts = np.unique(self.sizes[self.good_indices], axis=0, return_counts=True)
        return {
            "where": self.source.location,
            "images": len(self.source),
            "bytes": self.nbytes,
            "formats": dict(self.format_counts),
            "bad_formats": dict(self.bad_format_counts),
            "colours": dict(self.mode_counts),
            "sizes": [[*size, count] for size, count in zip(sizes.tolist(), counts.tolist())],
            "turned": self.num_rotated,
            "transparent": self.num_with_alpha,
            "classes": None
            if labels is None
            else dict(zip(classes, np.bincount(labels, minlength=len(classes)).tolist())),
            "copies": [[name(int(index)) for index in group] for group in self.duplicates],
            "copies_of_several_labels": [
                [name(int(index)) for index in group] for group in self.conflicting_duplicates
            ],
            "constant": [name(int(index)) for index in np.flatnonzero(self.is_flat)],
            "training": {
                "resolution": self.resolution,
                "channels": self.channels,
                "bytes": self.training_bytes,
                "held": self.in_memory,
            },
            "notes": list(self.source.notes),
            "bad": [{"name": name(index), "reason": reason} for index, reason in self.bad_reasons.items()],
        }

    def _describe_formats(self) -> str:
        bad = {name: f" ({count:,} bad)" for name, count in self.bad_format_counts.items()}
        return ", ".join(f"{name} {count:,}{bad.get(name, '')}" for name, count in self.format_counts.most_common())

    def _describe_duplicates(self) -> str:
        if not self.duplicates:
            return "none"
        more = sum(map(len, self.duplicates)) - len(self.duplicates)
        which = f"exact cop{'y' if more == 1 else 'ies'} of {len(self.duplicates):,} image{'s' * (len(self.duplicates) != 1)}"
        return f"{more:,} {which}, such as {self._format_names(self.duplicates[0])}"

    def _describe_conflicts(self) -> str:
        if not (mixed := self.conflicting_duplicates):
            return ""
        return f"{len(mixed):,} of the copied lie in several classes, such as {self._format_names(mixed[0])}"

    def _describe_flat(self) -> str:
        flat = np.flatnonzero(self.is_flat)
        return f"{len(flat):,} next to constant, such as {self._format_names(flat[:1])}" if len(flat) else "none"

    def _describe_training(self) -> str:
        colour, side = "grey" if self.channels == 1 else "RGB", self.resolution
        how = "held in memory" if self.in_memory else "decoded as it is needed"
        line = f"{side} x {side}, {colour}; {_format_bytes(self.training_bytes)}, {how}"
        if len(self.bad_reasons) <= MAX_BAD_FRACTION * len(self.source):
            return line
        return f"{line}; refused as it is, since more than {MAX_BAD_FRACTION:.0%} are bad (--data.max_bad_fraction)"

    def _describe_bad(self) -> str:
        return f"{len(self.bad_reasons):,} of {len(self.source):,} cannot be decoded" if self.bad_reasons else "none"

    def _bad_lines(self) -> list[str]:
        first = [
            f"  {self.source.sample_name(index)}: {reason}"
            for index, reason in [*self.bad_reasons.items()][:_MAX_LISTED_BAD]
        ]
        more = len(self.bad_reasons) - len(first)
        return first + [f"  and {more:,} more (--json FILE lists them)"] * bool(more)

    def _format_names(self, group: np.ndarray) -> str:
        return " = ".join(self.source.sample_name(int(index)) for index in group[:2])


def inspect_dataset(
    source: Source, *, resolution: int | None = None, progress: ProgressFn | None = None
) -> DatasetReport:
    """Read and decode every image once. `resolution` None is what `load` would choose.

    Holds some 40 bytes an image. Raises `Unusable` where not one can be decoded.
    """
    count = len(source)
    sizes, flat, grey = np.zeros((count, 2), np.int32), np.zeros(count, bool), np.zeros(count, bool)
    digests = np.zeros(count, "S16")
    forms, bad_forms, modes = Counter[str](), Counter[str](), Counter[str]()
    turned = clear = nbytes = 0
    bad: dict[int, str] = {}
    looks = ordered_parallel_map(
        count, lambda index: _inspect_record(source, index), is_local=source.is_local, progress=progress
    )
    for index, result in enumerate(looks):
        form, found = (UNREADABLE, result.reason) if isinstance(result, DecodeFailure) else result
        forms[form] += 1
        if isinstance(found, str):
            bad[index] = found
            bad_forms[form] += 1
            continue
        sizes[index] = found.width, found.height
        flat[index], grey[index], digests[index] = found.is_flat, found.is_grey, found.digest
        modes[found.mode] += 1
        turned, clear, nbytes = turned + found.is_rotated, clear + found.has_alpha, nbytes + found.nbytes
    good = sizes[:, 0] > 0
    if not good.any():
        raise UsageError(
            f"data: none of the {count:,} images of {source.location} can be decoded, {_first_failure(source, bad)}"
        )
    asked = header_sample(source)
    asked = asked[good[asked]] if good[asked].any() else np.flatnonzero(good)
    return DatasetReport(
        source=source,
        sizes=sizes,
        format_counts=forms,
        bad_format_counts=bad_forms,
        mode_counts=modes,
        num_rotated=turned,
        num_with_alpha=clear,
        is_flat=flat,
        duplicates=_group_duplicates(digests, np.flatnonzero(good)),
        bad_reasons=bad,
        nbytes=nbytes,
        resolution=resolution or choose_resolution(sizes[asked]),
        channels=1 if grey[asked].all() else 3,
    )


def _inspect_record(source: Source, index: int) -> tuple[str, ImageInfo | str]:
    """The format of an image, and what it is, or why it is bad. Raises `DecodeError` where it cannot be read."""
    record = source.read(index)
    try:
        return detect_format(record), inspect_image(record)
    except DecodeError as error:
        return detect_format(record), str(error)


def _group_duplicates(digests: np.ndarray, good: np.ndarray) -> tuple[np.ndarray, ...]:
    """The groups of two or more of equal digest, in the order of the set."""
    order = good[np.argsort(digests[good], kind="stable")]
    starts = np.flatnonzero(np.append(True, digests[order][1:] != digests[order][:-1]))
    ends = np.append(starts[1:], len(order))
    groups = [order[start:end] for start, end in zip(starts, ends) if end - start > 1]
    return tuple(sorted(groups, key=lambda group: int(group[0])))


def _first_failure(source: Source, bad_reasons: dict[int, str]) -> str:
    index, reason = next(iter(bad_reasons.items()))
    return f"such as {source.sample_name(index)}: {reason}"


def _format_counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def _format_sizes(sizes: np.ndarray) -> str:
    """Of [n, 2] widths and heights."""
    kinds = np.unique(sizes, axis=0)
    if len(kinds) == 1:
        return f"all {_format_size(kinds[0])}"
    by_area = sizes[np.argsort(sizes.astype(np.int64).prod(axis=1), kind="stable")]
    odd = int((sizes[:, 0] != sizes[:, 1]).sum())
    middle = f"median {_format_size(by_area[len(by_area) // 2])}"
    return f"{len(kinds):,}, {_format_size(by_area[0])} to {_format_size(by_area[-1])}, {middle}; {odd:,} not square"


def _format_size(size: Sequence[int] | np.ndarray) -> str:
    return f"{size[0]} x {size[1]}"


def _format_bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if round(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
