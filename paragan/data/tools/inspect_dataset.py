"""What a set of images is, every one of them decoded: `paragan data inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragan.core.errors import Unusable
from paragan.data.dataset import HELD, choose_resolution, looked_at, told_classes
from paragan.data.decode import Fault
from paragan.data.source import DecodeError, Source
from paragan.data.tools.image_info import Look, form_of, look
from paragan.data.tools.parallel_map import Tell, flow

BAD_SHARE = 0.01  # more than this, and training refuses the set unless told otherwise

UNREAD = "unreadable"  # the format of what cannot even be read

_SHOWN = 10  # bad images on a screen


@dataclass(frozen=True, eq=False)
class Survey:
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
    forms: Counter[str]
    bad_forms: Counter[str]
    modes: Counter[str]
    turned: int
    clear: int
    flat: np.ndarray
    copies: tuple[np.ndarray, ...]
    bad: dict[int, str]
    nbytes: int
    resolution: int
    channels: int

    @property
    def good(self) -> np.ndarray:
        """[n] the indices of images that can be decoded."""
        return np.flatnonzero(self.sizes[:, 0])

    @property
    def mixed(self) -> list[np.ndarray]:
        """Those groups of copies whose labels differ."""
        labels = self.source.labels
        return [] if labels is None else [group for group in self.copies if len(set(labels[group])) > 1]

    @property
    def trained_bytes(self) -> int:
        """What training takes to hold all."""
        return len(self.source) * self.resolution**2 * self.channels

    @property
    def held(self) -> bool:
        return self.source.near and self.trained_bytes <= HELD

    def lines(self) -> list[str]:
        """For people."""
        good = self.good
        rows = [
            ("images", f"{len(self.source):,}, {_bytes(self.nbytes)} ({_bytes(self.nbytes / len(good))} an image)"),
            ("formats", self._told_forms()),
            ("colours", _counts(self.modes)),
            ("sizes", _told_sizes(self.sizes[good])),
            ("EXIF", f"{self.turned:,} turned upright" if self.turned else ""),
            ("alpha", f"{self.clear:,} with transparency, composited on white" if self.clear else ""),
            ("classes", told_classes(self.source.labels, self.source.classes).removeprefix("no classes") or "none"),
            ("copies", self._told_copies()),
            ("labels", self._told_mixed()),
            ("constant", self._told_flat()),
            ("training", self._told_training()),
            *(("note", note) for note in self.source.notes),
            ("bad", self._told_bad()),
        ]
        return [f"{name:<9} {text}" for name, text in rows if text] + self._bad_ones()

    def to_json(self) -> dict[str, Any]:
        """All of it, by name rather than by index."""
        name, labels, classes = self.source.name, self.source.labels, self.source.classes
        sizes, counts = np.unique(self.sizes[self.good], axis=0, return_counts=True)
        return {
            "where": self.source.where,
            "images": len(self.source),
            "bytes": self.nbytes,
            "formats": dict(self.forms),
            "bad_formats": dict(self.bad_forms),
            "colours": dict(self.modes),
            "sizes": [[*size, count] for size, count in zip(sizes.tolist(), counts.tolist())],
            "turned": self.turned,
            "transparent": self.clear,
            "classes": None
            if labels is None
            else dict(zip(classes, np.bincount(labels, minlength=len(classes)).tolist())),
            "copies": [[name(int(index)) for index in group] for group in self.copies],
            "copies_of_several_labels": [[name(int(index)) for index in group] for group in self.mixed],
            "constant": [name(int(index)) for index in np.flatnonzero(self.flat)],
            "training": {
                "resolution": self.resolution,
                "channels": self.channels,
                "bytes": self.trained_bytes,
                "held": self.held,
            },
            "notes": list(self.source.notes),
            "bad": [{"name": name(index), "reason": reason} for index, reason in self.bad.items()],
        }

    def _told_forms(self) -> str:
        bad = {name: f" ({count:,} bad)" for name, count in self.bad_forms.items()}
        return ", ".join(f"{name} {count:,}{bad.get(name, '')}" for name, count in self.forms.most_common())

    def _told_copies(self) -> str:
        if not self.copies:
            return "none"
        more = sum(map(len, self.copies)) - len(self.copies)
        which = f"exact cop{'y' if more == 1 else 'ies'} of {len(self.copies):,} image{'s' * (len(self.copies) != 1)}"
        return f"{more:,} {which}, such as {self._names(self.copies[0])}"

    def _told_mixed(self) -> str:
        if not (mixed := self.mixed):
            return ""
        return f"{len(mixed):,} of the copied lie in several classes, such as {self._names(mixed[0])}"

    def _told_flat(self) -> str:
        flat = np.flatnonzero(self.flat)
        return f"{len(flat):,} next to constant, such as {self._names(flat[:1])}" if len(flat) else "none"

    def _told_training(self) -> str:
        colour, side = "grey" if self.channels == 1 else "RGB", self.resolution
        how = "held in memory" if self.held else "decoded as it is needed"
        line = f"{side} x {side}, {colour}; {_bytes(self.trained_bytes)}, {how}"
        if len(self.bad) <= BAD_SHARE * len(self.source):
            return line
        return f"{line}; refused as it is, since more than {BAD_SHARE:.0%} are bad (--data.bad_share)"

    def _told_bad(self) -> str:
        return f"{len(self.bad):,} of {len(self.source):,} cannot be decoded" if self.bad else "none"

    def _bad_ones(self) -> list[str]:
        first = [f"  {self.source.name(index)}: {reason}" for index, reason in [*self.bad.items()][:_SHOWN]]
        more = len(self.bad) - len(first)
        return first + [f"  and {more:,} more (--json FILE lists them)"] * bool(more)

    def _names(self, group: np.ndarray) -> str:
        return " = ".join(self.source.name(int(index)) for index in group[:2])


def survey(source: Source, *, resolution: int | None = None, tell: Tell | None = None) -> Survey:
    """Read and decode every image once. `resolution` None is what `load` would choose.

    Holds some 40 bytes an image. Raises `Unusable` where not one can be decoded.
    """
    count = len(source)
    sizes, flat, grey = np.zeros((count, 2), np.int32), np.zeros(count, bool), np.zeros(count, bool)
    digests = np.zeros(count, "S16")
    forms, bad_forms, modes = Counter[str](), Counter[str](), Counter[str]()
    turned = clear = nbytes = 0
    bad: dict[int, str] = {}
    looks = flow(count, lambda index: _look(source, index), near=source.near, tell=tell)
    for index, result in enumerate(looks):
        form, found = (UNREAD, result.reason) if isinstance(result, Fault) else result
        forms[form] += 1
        if isinstance(found, str):
            bad[index] = found
            bad_forms[form] += 1
            continue
        sizes[index] = found.width, found.height
        flat[index], grey[index], digests[index] = found.flat, found.grey, found.digest
        modes[found.mode] += 1
        turned, clear, nbytes = turned + found.turned, clear + found.clear, nbytes + found.nbytes
    good = sizes[:, 0] > 0
    if not good.any():
        raise Unusable(f"data: none of the {count:,} images of {source.where} can be decoded, {_first(source, bad)}")
    asked = looked_at(source)
    asked = asked[good[asked]] if good[asked].any() else np.flatnonzero(good)
    return Survey(
        source=source,
        sizes=sizes,
        forms=forms,
        bad_forms=bad_forms,
        modes=modes,
        turned=turned,
        clear=clear,
        flat=flat,
        copies=_copies(digests, np.flatnonzero(good)),
        bad=bad,
        nbytes=nbytes,
        resolution=resolution or choose_resolution(sizes[asked]),
        channels=1 if grey[asked].all() else 3,
    )


def _look(source: Source, index: int) -> tuple[str, Look | str]:
    """The format of an image, and what it is, or why it is bad. Raises `DecodeError` where it cannot be read."""
    record = source.read(index)
    try:
        return form_of(record), look(record)
    except DecodeError as error:
        return form_of(record), str(error)


def _copies(digests: np.ndarray, good: np.ndarray) -> tuple[np.ndarray, ...]:
    """The groups of two or more of equal digest, in the order of the set."""
    order = good[np.argsort(digests[good], kind="stable")]
    starts = np.flatnonzero(np.append(True, digests[order][1:] != digests[order][:-1]))
    ends = np.append(starts[1:], len(order))
    groups = [order[start:end] for start, end in zip(starts, ends) if end - start > 1]
    return tuple(sorted(groups, key=lambda group: int(group[0])))


def _first(source: Source, bad: dict[int, str]) -> str:
    index, reason = next(iter(bad.items()))
    return f"such as {source.name(index)}: {reason}"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())


def _told_sizes(sizes: np.ndarray) -> str:
    """Of [n, 2] widths and heights."""
    kinds = np.unique(sizes, axis=0)
    if len(kinds) == 1:
        return f"all {_x(kinds[0])}"
    by_area = sizes[np.argsort(sizes.astype(np.int64).prod(axis=1), kind="stable")]
    odd = int((sizes[:, 0] != sizes[:, 1]).sum())
    middle = f"median {_x(by_area[len(by_area) // 2])}"
    return f"{len(kinds):,}, {_x(by_area[0])} to {_x(by_area[-1])}, {middle}; {odd:,} not square"


def _x(size: Sequence[int] | np.ndarray) -> str:
    return f"{size[0]} x {size[1]}"


def _bytes(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if round(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"
