"""The images a run trains on, from wherever they lie: uint8, in memory or decoded as they are asked for."""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.data.bad_samples import BadSamples
from paragan.data.decode import DecodeFailure, Header, parallel_map, read_header
from paragan.data.formats.array import to_float32
from paragan.data.formats.npz import check_labels
from paragan.data.open_source import open_source
from paragan.data.source import DecodeError, Source
from paragan.data.storage.filesystem import RemoteOptions, printable, redact_url
from paragan.data.streaming import StreamingImages

CacheMode = Literal["auto", "memory", "stream"]
MAX_AUTO_CACHE_BYTES = 2 * 2**30  # bytes of pixels that are held in memory unless asked otherwise
HEADER_SAMPLE, HEADER_SAMPLE_REMOTE = 20_000, 256  # headers that are read

_MAX_LISTED_CLASSES = 20  # classes described one by one; beyond, the smallest and largest few


@dataclass(frozen=True, eq=False)
class Dataset:
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

    images: np.ndarray | StreamingImages
    labels: np.ndarray | None
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    bad_samples: BadSamples | None = None

    @property
    def in_memory(self) -> bool:
        """Whether they are in memory."""
        return isinstance(self.images, np.ndarray)

    @property
    def is_array(self) -> bool:
        """Whether they are no images."""
        return self.images.dtype == np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one, as networks see it: [C, R, R], or that of the numbers."""
        if self.is_array:
            return self.images.shape[1:]
        _, side, _, channels = self.images.shape
        return channels, side, side

    def describe(self) -> str:
        """A few lines for people: count, size, colour, classes, and what the images were before resizing."""
        count, *_ = self.images.shape
        if self.is_array:
            what = f"{count:,} records of {' x '.join(map(str, self.shape))} numbers, float32"
        else:
            channels, side, _ = self.shape
            what = f"{count:,} image{'s' * (count != 1)}, {side} x {side}, {'grey' if channels == 1 else 'RGB'}"
        lines = [what, describe_classes(self.labels, self.classes), *self.notes]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False) for line in lines)

    def only_class(self, label: int) -> Dataset:
        """The images of one class, without labels. Unusable where there is no such class, or no image of it."""
        if self.labels is None:
            raise UsageError(f"data.only_class={label}: these images have no classes; leave data.only_class out")
        if not 0 <= label < len(self.classes):
            raise UsageError(
                f"data.only_class={label}: there is no such class; use a number from 0 to {len(self.classes) - 1}"
            )
        rows = np.flatnonzero(self.labels == label)
        if not len(rows):
            raise UsageError(
                f"data.only_class={label}: class {self.classes[label]} has no image; add some, or take another"
            )
        notes = (*self.notes, f"class {label} ({self.classes[label]}) alone")
        if isinstance(self.images, StreamingImages):
            mine = self.images.subset(rows)
            return Dataset(mine, None, (), _streaming_fingerprint(mine, None), notes, self.bad_samples)
        pixels = self.images[rows]
        return Dataset(pixels, None, (), compute_fingerprint(pixels, None), notes, self.bad_samples)


def from_arrays(x: np.ndarray, labels: np.ndarray | None = None, classes: tuple[str, ...] = ()) -> Dataset:
    """A set that is in memory: images uint8 [N, R, R, C] or [N, R, R], or numbers float [N, ...], which networks see as
    they are. labels: integers [N] in 0..K-1. Raises `Unusable` for other arrays."""
    if x.dtype == np.uint8:
        pixels = x[..., None] if x.ndim == 3 else x
        if pixels.ndim != 4 or pixels.shape[1] != pixels.shape[2] or pixels.shape[3] not in (1, 3) or 0 in x.shape:
            raise UsageError(f"data: uint8 {list(x.shape)} are no square images [N, R, R, C] with C 1 or 3")
    else:
        pixels = to_float32(x, "the array")
    if labels is not None:
        labels = np.asarray(labels)
        if labels.dtype.kind not in "iu" or labels.shape != (len(x),):
            raise UsageError(f"data: labels are {labels.dtype} {list(labels.shape)}, wanted integers [{len(x)}]")
        check_labels(labels, "the arrays", len(classes) or None)
        labels = labels.astype(np.int64)
        classes = classes or tuple(str(label) for label in range(int(labels.max()) + 1))
    return Dataset(pixels, labels, classes if labels is not None else (), compute_fingerprint(pixels, labels))


def describe_classes(labels: np.ndarray | None, classes: tuple[str, ...]) -> str:
    """A line for people: how many classes, and how many images each has."""
    if labels is None:
        return "no classes"
    counts = np.bincount(labels, minlength=len(classes))  # [K]

    def format_classes(class_ids: Iterable[int]) -> str:
        return ", ".join(f"{classes[label]} ({counts[label]:,})" for label in class_ids)

    if len(counts) <= _MAX_LISTED_CLASSES:
        return f"{len(counts)} class{'es' * (len(counts) != 1)}: {format_classes(range(len(counts)))}"
    order = np.argsort(counts, kind="stable")
    return (
        f"{len(counts):,} classes of {counts.min():,} to {counts.max():,} images; "
        f"smallest: {format_classes(order[:3])}; largest: {format_classes(order[:-4:-1])}"
    )


def header_sample(source: Source) -> np.ndarray:
    """[n] the images whose headers stand for all: every one, or an even sample of a large set."""
    most = HEADER_SAMPLE if source.is_local else HEADER_SAMPLE_REMOTE
    return np.linspace(0, len(source) - 1, min(len(source), most)).astype(np.int64)


def load_data(
    location: str,
    *,
    resolution: int | None,
    channels: int | None = None,
    labels: bool = True,
    cache: CacheMode = "auto",
    max_bad_fraction: float = 0.01,
    remote: RemoteOptions | None = None,
) -> Dataset:
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
        raise UsageError(f"resolution: {resolution} is no size: use a power of two from 8 on, such as 32")
    if channels not in (None, 1, 3):
        raise UsageError(f"channels: {channels} is not possible: use 1 (grey) or 3 (RGB)")
    try:
        source = open_source(location, remote, labels=labels)
        return _build_dataset(source, resolution, channels, labels, cache, max_bad_fraction)
    except RunError as error:
        raise UsageError(str(error)) from error
    except DecodeError as error:  # of the set itself: a bad image has a stand-in
        raise UsageError(f"data: {printable(redact_url(location))}: {error}: check the path or address") from None
    except OSError as error:
        name = printable(error.filename or redact_url(location))
        raise UsageError(
            f"data: {name} cannot be read: {error.strerror or error}; check path and permissions"
        ) from None


def _build_dataset(
    source: Source,
    resolution: int | None,
    channels: int | None,
    labels: bool,
    cache: CacheMode,
    max_bad_fraction: float,
) -> Dataset:
    numbers, classes = (source.labels, source.classes) if labels else (None, ())
    if source.array is not None and source.array.dtype == np.float32:
        if resolution or channels or cache == "stream":
            raise UsageError(
                f"data: {source.location} holds numbers, no images: leave data.resolution, data.channels and "
                "data.cache=stream out"
            )
        return Dataset(source.array, numbers, classes, compute_fingerprint(source.array, numbers), source.notes)
    bad = BadSamples(numbers, len(source), source.sample_name, max_bad_fraction)
    seen = scan_headers(source, bad)
    side, depth = resolution or choose_resolution(seen.sizes), channels or (1 if seen.is_grey else 3)
    notes = (
        *_describe_sizes(seen, side, resolution is None),
        *_describe_colour(seen.is_grey, depth),
        *seen.notes,
        *source.notes,
    )
    pixels = StreamingImages(source, bad, side, depth)
    if cache == "stream" or (cache == "auto" and (not source.is_local or pixels.nbytes > MAX_AUTO_CACHE_BYTES)):
        return Dataset(
            pixels, numbers, classes, _streaming_fingerprint(pixels, numbers), (*notes, "decoded as it is needed"), bad
        )
    images = pixels.read_all()
    return Dataset(images, numbers, classes, compute_fingerprint(images, numbers), (*notes, *_describe_bad(bad)), bad)


def choose_resolution(sizes: np.ndarray) -> int:
    """The resolution for images of `sizes` [N, 2] (width, height), where nobody asked for one; see `load`."""
    first = int(sizes[0, 0])
    if (sizes == first).all() and first >= 8 and first.bit_count() == 1:
        return first
    median = int(np.ceil(np.median(sizes.min(axis=1))))
    return min(64, max(8, 1 << (median - 1).bit_length()))


def compute_fingerprint(images: np.ndarray, labels: np.ndarray | None) -> str:
    """16 hex digits of the sha256 over shape, pixels [N, R, R, C] uint8 (or numbers) and labels [N] integers."""
    digest = hashlib.sha256(repr((images.shape, labels is not None)).encode())
    digest.update(np.ascontiguousarray(images).reshape(-1).data)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels, dtype="<i8").view(np.uint8).data)
    return digest.hexdigest()[:16]


def _streaming_fingerprint(pixels: StreamingImages, labels: np.ndarray | None) -> str:
    """16 hex digits that tell a set from others without decoding it."""
    digest = hashlib.sha256(repr((pixels.shape, labels is not None)).encode())
    for part in pixels.source.fingerprint_parts():
        digest.update(part)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels, dtype="<i8").view(np.uint8).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class HeaderScan:
    """What the headers of a set say."""

    sizes: np.ndarray  # [n, 2] width, height of those whose header can be read
    is_grey: bool
    notes: tuple[str, ...] = ()


def scan_headers(source: Source, bad_samples: BadSamples) -> HeaderScan:
    """Read headers: of all images, or of an even sample of a large set."""
    if source.array is not None:
        count, height, width, channels = source.array.shape
        return HeaderScan(np.broadcast_to(np.array([width, height]), (count, 2)), channels == 1)
    chosen = header_sample(source)
    found = parallel_map(
        len(chosen), lambda index: read_header(source.read(int(chosen[index]))), 0 if source.is_local else 32
    )
    headers = [one for one in found if isinstance(one, Header)]
    if not headers:
        for fault in found:
            if isinstance(fault, DecodeFailure):
                bad_samples.reasons[int(chosen[fault.index])] = fault.reason
        raise UsageError(bad_samples.error_message())
    clear, sample = sum(one.has_alpha for one in headers), len(chosen) < len(source)
    among = f" of the {len(chosen):,} looked at" if sample else ""
    notes = [f"{clear:,}{among} may have transparency, which is composited on white"] * bool(clear)
    notes += [f"sizes and colour are those of {len(chosen):,} images, evenly chosen"] * sample
    sizes = np.array([(one.width, one.height) for one in headers])
    return HeaderScan(sizes, all(one.is_grey for one in headers), tuple(notes))


def _describe_bad(bad_samples: BadSamples) -> list[str]:
    count = len(bad_samples.reasons)
    if not count:
        return []
    return [f"{count:,} cannot be decoded; others of the same class stand in: {bad_samples.to_lines()[0]}, ..."]


# What describe() says ---------------------------------------------------------------------------------------


def _describe_sizes(scan: HeaderScan, resolution: int, is_automatic: bool) -> list[str]:
    sizes = scan.sizes
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
    if is_automatic and done:
        lines += [
            f"resolution {resolution} was chosen: the power of two at or above the median short side, "
            f"at least 8, at most 64; give one to change it"
        ]
    return lines


def _describe_colour(is_grey: bool, channels: int) -> list[str]:
    if is_grey == (channels == 1):
        return []
    return ["grey repeated to RGB"] if is_grey else ["colour reduced to grey"]
