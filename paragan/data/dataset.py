"""The images a run trains on, from wherever they lie: uint8, in memory or decoded as they are asked for."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paragan.core.errors import Failed, Unusable
from paragan.data.bad_samples import Bad
from paragan.data.decode import Fault, Header, each, header
from paragan.data.formats.array import values
from paragan.data.formats.npz import check_labels
from paragan.data.open_source import find
from paragan.data.source import DecodeError, Source
from paragan.data.storage.filesystem import Reach, public, shown
from paragan.data.streaming import Streamed

Hold = Literal["auto", "memory", "stream"]
HELD = 2 * 2**30  # bytes of pixels that are held in memory unless asked otherwise
LOOKED_AT, LOOKED_AT_FAR = 20_000, 256  # headers that are read

_SPELLED_OUT = 20  # classes described one by one; beyond, the smallest and largest few


@dataclass(frozen=True, eq=False)
class Images:
    """A labelled set of images, or of numbers of another shape.

    images : [N, R, R, C] uint8, C 1 (grey) or 3 (RGB): in memory, or read when they are indexed; or float32 [N, ...],
        numbers that networks see as they are
    labels : [N] int64 in 0..K-1; None without classes
    classes : [K] names; () without
    fingerprint : of shape, labels and pixels (streamed: of names, sizes and checksums); a resume on other data is
        noticed by it
    notes  : what was found and done to it, for `describe`
    bad    : which cannot be decoded, as far as they were met
    """

    images: np.ndarray | Streamed
    labels: np.ndarray | None
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    bad: Bad | None = None

    @property
    def held(self) -> bool:
        """Whether they are in memory."""
        return isinstance(self.images, np.ndarray)

    @property
    def numbers(self) -> bool:
        """Whether they are no images."""
        return self.images.dtype == np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one, as networks see it: [C, R, R], or that of the numbers."""
        if self.numbers:
            return self.images.shape[1:]
        _, side, _, channels = self.images.shape
        return channels, side, side

    def describe(self) -> str:
        """A few lines for people: count, size, colour, classes, and what the images were before resizing."""
        count, *_ = self.images.shape
        if self.numbers:
            what = f"{count:,} records of {' x '.join(map(str, self.shape))} numbers, float32"
        else:
            channels, side, _ = self.shape
            what = f"{count:,} image{'s' * (count != 1)}, {side} x {side}, {'grey' if channels == 1 else 'RGB'}"
        lines = [what, told_classes(self.labels, self.classes), *self.notes]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False) for line in lines)

    def of_class(self, label: int) -> Images:
        """The images of one class, without labels. Unusable where there is no such class, or no image of it."""
        if self.labels is None:
            raise Unusable(f"data.only={label}: these images have no classes; leave data.only out")
        if not 0 <= label < len(self.classes):
            raise Unusable(f"data.only={label}: there is no such class; use a number from 0 to {len(self.classes) - 1}")
        rows = np.flatnonzero(self.labels == label)
        if not len(rows):
            raise Unusable(f"data.only={label}: class {self.classes[label]} has no image; add some, or take another")
        notes = (*self.notes, f"class {label} ({self.classes[label]}) alone")
        if isinstance(self.images, Streamed):
            mine = self.images.of_rows(rows)
            return Images(mine, None, (), _identity(mine, None), notes, self.bad)
        pixels = self.images[rows]
        return Images(pixels, None, (), fingerprint(pixels, None), notes, self.bad)


def from_arrays(x: np.ndarray, labels: np.ndarray | None = None, classes: tuple[str, ...] = ()) -> Images:
    """A set that is in memory: images uint8 [N, R, R, C] or [N, R, R], or numbers float [N, ...], which networks see as
    they are. labels: integers [N] in 0..K-1. Raises `Unusable` for other arrays."""
    if x.dtype == np.uint8:
        pixels = x[..., None] if x.ndim == 3 else x
        if pixels.ndim != 4 or pixels.shape[1] != pixels.shape[2] or pixels.shape[3] not in (1, 3) or 0 in x.shape:
            raise Unusable(f"data: uint8 {list(x.shape)} are no square images [N, R, R, C] with C 1 or 3")
    else:
        pixels = values(x, "the array")
    if labels is not None:
        labels = np.asarray(labels)
        if labels.dtype.kind not in "iu" or labels.shape != (len(x),):
            raise Unusable(f"data: labels are {labels.dtype} {list(labels.shape)}, wanted integers [{len(x)}]")
        check_labels(labels, "the arrays", len(classes) or None)
        labels = labels.astype(np.int64)
        classes = classes or tuple(str(label) for label in range(int(labels.max()) + 1))
    return Images(pixels, labels, classes if labels is not None else (), fingerprint(pixels, labels))


def told_classes(labels: np.ndarray | None, classes: tuple[str, ...]) -> str:
    """A line for people: how many classes, and how many images each has."""
    if labels is None:
        return "no classes"
    counts = np.bincount(labels, minlength=len(classes))  # [K]

    def tell(which: Iterable[int]) -> str:
        return ", ".join(f"{classes[label]} ({counts[label]:,})" for label in which)

    if len(counts) <= _SPELLED_OUT:
        return f"{len(counts)} class{'es' * (len(counts) != 1)}: {tell(range(len(counts)))}"
    order = np.argsort(counts, kind="stable")
    return (
        f"{len(counts):,} classes of {counts.min():,} to {counts.max():,} images; "
        f"smallest: {tell(order[:3])}; largest: {tell(order[:-4:-1])}"
    )


def looked_at(source: Source) -> np.ndarray:
    """[n] the images whose headers stand for all: every one, or an even sample of a large set."""
    most = LOOKED_AT if source.near else LOOKED_AT_FAR
    return np.linspace(0, len(source) - 1, min(len(source), most)).astype(np.int64)


def load(
    where: str,
    *,
    resolution: int | None,
    channels: int | None = None,
    labels: bool = True,
    hold: Hold = "auto",
    bad_share: float = 0.01,
    reach: Reach | None = None,
) -> Images:
    """Find and check a set of images, and decode it, or make ready to decode it as it is asked for.

    `where` is what `find.find` knows: the word `digits`, a file, a folder, or an address.

    Every image is cropped to the largest square in its centre and resized to R x R (LANCZOS); one of that
    size is untouched, bit for bit. Transparency is composited on white. `resolution` None takes the native
    size if all images share one that networks accept (square, a power of two from 8 on), else the power of
    two at or above the median of the short sides, at least 8, at most 64. `channels` None is 1 if every image
    is grey, else 3. Of more than 20,000 images (far away 256) an even sample is asked for that. `labels=False` drops
    labels and classes. `hold` "memory" decodes all now, "stream" each when it is needed; "auto" holds what is near and
    becomes at most 2 GiB. For an image that cannot be decoded stands another of its class (`Bad`), up to `bad_share`
    of all.

    Raises `Unusable`, one line, for whatever cannot be used: a path, a format, too many damaged files, a folder
    without images, labels that do not fit, or more pixels than half of the machine's memory holds.
    """
    if resolution is not None and resolution < 1:
        raise Unusable(f"resolution: {resolution} is no size: use a power of two from 8 on, such as 32")
    if channels not in (None, 1, 3):
        raise Unusable(f"channels: {channels} is not possible: use 1 (grey) or 3 (RGB)")
    try:
        source = find(where, reach, labels=labels)
        return _opened(source, resolution, channels, labels, hold, bad_share)
    except Failed as error:
        raise Unusable(str(error)) from error
    except DecodeError as error:  # of the set itself: a bad image has a stand-in
        raise Unusable(f"data: {shown(public(where))}: {error}: check the path or address") from None
    except OSError as error:
        name = shown(error.filename or public(where))
        raise Unusable(f"data: {name} cannot be read: {error.strerror or error}; check path and permissions") from None


def _opened(
    source: Source, resolution: int | None, channels: int | None, labels: bool, hold: Hold, bad_share: float
) -> Images:
    numbers, classes = (source.labels, source.classes) if labels else (None, ())
    if source.whole is not None and source.whole.dtype == np.float32:
        if resolution or channels or hold == "stream":
            raise Unusable(
                f"data: {source.where} holds numbers, no images: leave data.resolution, data.channels and "
                "data.hold=stream out"
            )
        return Images(source.whole, numbers, classes, fingerprint(source.whole, numbers), source.notes)
    bad = Bad(numbers, len(source), source.name, bad_share)
    seen = glance(source, bad)
    side, depth = resolution or choose_resolution(seen.sizes), channels or (1 if seen.grey else 3)
    notes = (*_sizes(seen, side, resolution is None), *_colour(seen.grey, depth), *seen.notes, *source.notes)
    pixels = Streamed(source, bad, side, depth)
    if hold == "stream" or (hold == "auto" and (not source.near or pixels.nbytes > HELD)):
        return Images(pixels, numbers, classes, _identity(pixels, numbers), (*notes, "decoded as it is needed"), bad)
    images = pixels.all()
    return Images(images, numbers, classes, fingerprint(images, numbers), (*notes, *_left_out(bad)), bad)


def choose_resolution(sizes: np.ndarray) -> int:
    """The resolution for images of `sizes` [N, 2] (width, height), where nobody asked for one; see `load`."""
    first = int(sizes[0, 0])
    if (sizes == first).all() and first >= 8 and first.bit_count() == 1:
        return first
    median = int(np.ceil(np.median(sizes.min(axis=1))))
    return min(64, max(8, 1 << (median - 1).bit_length()))


def fingerprint(images: np.ndarray, labels: np.ndarray | None) -> str:
    """16 hex digits of the sha256 over shape, pixels [N, R, R, C] uint8 (or numbers) and labels [N] integers."""
    digest = hashlib.sha256(repr((images.shape, labels is not None)).encode())
    digest.update(np.ascontiguousarray(images).reshape(-1).data)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels, dtype="<i8").view(np.uint8).data)
    return digest.hexdigest()[:16]


def _identity(pixels: Streamed, labels: np.ndarray | None) -> str:
    """16 hex digits that tell a set from others without decoding it."""
    digest = hashlib.sha256(repr((pixels.shape, labels is not None)).encode())
    for part in pixels.source.identity():
        digest.update(part)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels, dtype="<i8").view(np.uint8).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Glance:
    """What the headers of a set say."""

    sizes: np.ndarray  # [n, 2] width, height of those whose header can be read
    grey: bool
    notes: tuple[str, ...] = ()


def glance(source: Source, bad: Bad) -> Glance:
    """Read headers: of all images, or of an even sample of a large set."""
    if source.whole is not None:
        count, height, width, channels = source.whole.shape
        return Glance(np.broadcast_to(np.array([width, height]), (count, 2)), channels == 1)
    chosen = looked_at(source)
    found = each(len(chosen), lambda index: header(source.read(int(chosen[index]))), 0 if source.near else 32)
    headers = [one for one in found if isinstance(one, Header)]
    if not headers:
        for fault in found:
            if isinstance(fault, Fault):
                bad.reasons[int(chosen[fault.index])] = fault.reason
        raise Unusable(bad.refusal())
    clear, sample = sum(one.clear for one in headers), len(chosen) < len(source)
    among = f" of the {len(chosen):,} looked at" if sample else ""
    notes = [f"{clear:,}{among} may have transparency, which is composited on white"] * bool(clear)
    notes += [f"sizes and colour are those of {len(chosen):,} images, evenly chosen"] * sample
    sizes = np.array([(one.width, one.height) for one in headers])
    return Glance(sizes, all(one.grey for one in headers), tuple(notes))


def _left_out(bad: Bad) -> list[str]:
    count = len(bad.reasons)
    if not count:
        return []
    return [f"{count:,} cannot be decoded; others of the same class stand in: {bad.lines()[0]}, ..."]


# What describe() says ---------------------------------------------------------------------------------------


def _sizes(seen: Glance, resolution: int, chosen: bool) -> list[str]:
    sizes = seen.sizes
    short = sizes.min(axis=1)
    kinds = np.unique(sizes, axis=0)  # [kinds, 2]
    kinds = kinds[np.argsort(kinds.prod(axis=1), kind="stable")]
    (width, height), (widest, highest) = kinds[0], kinds[-1]
    line = f"found {width} x {height}"
    if len(kinds) > 1:
        line = f"found {len(kinds):,} sizes, {width} x {height} to {widest} x {highest}"
        line += f", median short side {np.median(short):g}"
    done = ["centre-cropped"] * bool((kinds[:, 0] != kinds[:, 1]).any())
    done += [f"resized to {resolution} x {resolution} (LANCZOS)"] * bool((short != resolution).any())
    lines = [f"{line}; {' and '.join(done) or 'untouched'}"]
    if chosen and done:
        lines += [
            f"resolution {resolution} was chosen: the power of two at or above the median short side, "
            f"at least 8, at most 64; give one to change it"
        ]
    return lines


def _colour(grey: bool, channels: int) -> list[str]:
    if grey == (channels == 1):
        return []
    return ["grey repeated to RGB"] if grey else ["colour reduced to grey"]
