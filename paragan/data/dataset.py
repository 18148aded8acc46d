"""The data set of a run: images uint8, in memory or streaming, arrays of numbers float32, or records of several arrays.

Numbers come from `x` of an npz, from an npy, or from Python. They are kept in memory, unchanged, and plotted by their
shape (`core.array_plots`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.core.image_encoding import ImageEncoding
from paragan.core.image_shape import PICTURE_CHANNELS, ImageSize, check_channels, check_resolution
from paragan.data.bad_samples import MAX_BAD_FRACTION, BadSamples
from paragan.data.decode import (
    DecodeFailure,
    Header,
    allow_pixels,
    largest_part,
    measure_record,
    parallel_map,
    read_header,
)
from paragan.data.formats.array import ArraySource, DeepArraySource, to_float32
from paragan.data.formats.class_labels import check_labels, resolve_class_names
from paragan.data.formats.record_source import RecordSource, records_from_arrays
from paragan.data.open_source import open_source
from paragan.data.records.decoder import RecordOptions
from paragan.data.records.streaming_records import (
    StreamingRecords,
    estimate_bytes,
    open_records,
    read_into_memory,
)
from paragan.data.source import DecodeError, LabelChoice, Source
from paragan.data.storage.filesystem import RemoteOptions, printable, redact_url
from paragan.data.streaming import StreamingImages, StreamingRows
from paragan.data.value_range import AUTO, FULL, ImageValues, RangeOption, ValueRange, ValueScan, parse_range

CacheMode = Literal["auto", "memory", "stream"]
MAX_AUTO_CACHE_BYTES = 2 * 2**30  # pixels up to this size are cached in memory with data.cache=auto
HEADER_SAMPLE = 20_000  # headers that are read to choose a resolution
HEADER_SAMPLE_REMOTE = 256
DEEP_SAMPLE = 2048  # files of those with more than 8 bits whose values are read to find their range
PLAIN_SAMPLE = 64  # 8-bit images whose pixels are read to see whether the set is constant

_MAX_LISTED_CLASSES = 20  # of more classes, `describe` lists the smallest and largest few


@dataclass(frozen=True, eq=False)
class Dataset:
    """A labelled data set of images, or of numbers of any shape.

    images      : [N, H, W, C] uint8, C 1 (grey), 3 (RGB) or other, in memory or read when they are indexed; or numbers
                  [N, ...] float32, which networks see unchanged; of records of several arrays, the one that D judges
    labels      : [N] int64 in 0..K-1; None without classes
    classes     : [K] names; () without classes
    fingerprint : of shape, labels and pixels (streaming: of names, sizes and checksums), to notice a resume on other
                  data
    notes       : lines for `describe`
    bad_samples : images known to be bad; None for numbers and arrays
    value_range : the stored values that became 0 and 255; None for 8-bit images and numbers
    encoding    : of numbers [N, c, h, w] that are latents of images, what decodes them
    open_originals : opens the images that latents were made from
    """

    images: np.ndarray | StreamingRows
    labels: np.ndarray | None
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()
    bad_samples: BadSamples | None = None
    value_range: ValueRange | None = None
    encoding: ImageEncoding | None = None
    open_originals: Callable[[], Dataset] | None = None

    @functools.cached_property
    def originals(self) -> Dataset:
        """The images that latents were made from; of other data the data set itself.

        Raises:
            UsageError: the images cannot be read.
        """
        return self.open_originals() if self.open_originals else self

    @property
    def in_memory(self) -> bool:
        """Whether all images are in memory."""
        return isinstance(self.images, np.ndarray) or (
            isinstance(self.images, StreamingRecords) and self.images.in_memory
        )

    @property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the arrays of a record as networks see them, by name; empty if a record is one array."""
        return self.images.layout.shapes if isinstance(self.images, StreamingRecords) else {}

    @property
    def main_field(self) -> str:
        """Name of the array that D judges, if a record has several; else ""."""
        return self.images.layout.main if isinstance(self.images, StreamingRecords) else ""

    @property
    def sample_rate(self) -> int:
        """Sample rate of the waves that D judges, Hz; 0 for other data, and for arrays, which have none."""
        return self.images.sample_rate if isinstance(self.images, StreamingRecords) else 0

    @property
    def is_array(self) -> bool:
        """Whether the data is numbers rather than images."""
        return self.images.dtype == np.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record as networks see it: (C, H, W), or that of the numbers."""
        if self.is_array:
            return self.images.shape[1:]
        _, height, width, channels = self.images.shape
        return channels, height, width

    @property
    def shows_images(self) -> bool:
        """Return whether the data is images, or latents that are decoded to images."""
        return not self.is_array or self.encoding is not None

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of a sample of a generator: (C, H, W) of the decoded image for latents, else `shape`."""
        return self.encoding.image_shape if self.encoding else self.shape

    @property
    def size(self) -> ImageSize:
        """Width and height of the images, pixels; (0, 0) for numbers."""
        if self.is_array:
            return ImageSize(0, 0)
        _, height, width = self.shape
        return ImageSize(width, height)

    def describe(self) -> str:
        """Return a few lines for people: count, size, colour, classes, and what was done to the images."""
        count, *_ = self.images.shape
        if isinstance(self.images, StreamingRecords):
            rate = f"; {self.sample_rate} Hz" if self.sample_rate else ""
            summary = f"{count:,} records of {self.images.layout.describe()}{rate}"
        elif self.is_array:
            summary = f"{count:,} records of {' x '.join(map(str, self.shape))} numbers, float32"
        else:
            channels, _, _ = self.shape
            unit = "image" if count == 1 else "images"
            summary = f"{count:,} {unit}, {self.size}, {describe_channels(channels)}"
        lines = [summary, describe_classes(self.labels, self.classes), *self.notes]
        return "\n".join(textwrap.fill(line, 100, subsequent_indent="  ", break_long_words=False) for line in lines)

    def only_class(self, label: int) -> Dataset:
        """Return the images of one class as a data set without labels.

        Raises:
            UsageError: there is no such class, or it has no image.
        """
        if self.labels is None:
            raise UsageError(f"data.only={label}: these images have no classes. Leave data.only out")
        if not 0 <= label < len(self.classes):
            raise UsageError(
                f"data.only={label}: there is no such class. Use a number from 0 to {len(self.classes) - 1}"
            )
        rows = np.flatnonzero(self.labels == label)
        if not len(rows):
            raise UsageError(
                f"data.only={label}: class {self.classes[label]} has no image; add some, or use another class"
            )
        notes = (*self.notes, f"only class {label} ({self.classes[label]})")
        if isinstance(self.images, StreamingRows):
            subset = self.images.subset(rows)
            fingerprint = _streaming_fingerprint(subset, None)
            return Dataset(subset, None, (), fingerprint, notes, self.bad_samples, self.value_range)
        pixels = self.images[rows]
        return replace(
            self,
            images=pixels,
            labels=None,
            classes=(),
            fingerprint=compute_fingerprint(pixels, None),
            notes=notes,
            open_originals=(lambda: self.originals.only_class(label)) if self.open_originals else None,
        )


def from_arrays(
    x: np.ndarray | Mapping[str, np.ndarray],
    labels: np.ndarray | None = None,
    classes: tuple[str, ...] = (),
    channels: int | None = None,
    *,
    field: str = "",
    segment: int = 0,
    transform: str = "",
) -> Dataset:
    """Make a data set of arrays.

    Args:
        x: images [N, H, W, C] or [N, H, W] uint8, or numbers [N, ...] of a floating-point type; or several arrays
            [N, ...] by name, which are the fields of N records.
        labels: [N] integers in 0..K-1, or None.
        classes: [K] names; their numbers if there are none.
        channels: C, if it is neither 1 (grey) nor 3 (RGB).
        field: of several arrays, the one that D judges; "" for `image`, `wave` or the only one.
        segment: of several arrays, cut random segments of so many samples of the judged one.
        transform: of several arrays, `module:function` that each record passes (`DataOptions`).

    Raises:
        UsageError: arrays of another type or shape.
    """
    if isinstance(x, Mapping):
        source = records_from_arrays(x, labels, classes)
        options = RecordOptions(field=field, segment=segment, transform=transform)
        return _build_records(source, True, "memory", MAX_BAD_FRACTION, options)
    if field or segment or transform:
        raise UsageError("from_arrays: field, segment and transform are of several arrays. Use x={name: array}")
    if x.dtype == np.uint8:
        pixels = x[..., None] if x.ndim == 3 else x
        if 0 in x.shape:
            raise UsageError(f"data: uint8 {list(x.shape)} holds no image")
        if pixels.ndim != 4:
            raise UsageError(
                f"data: uint8 {list(x.shape)} are not images [N, H, W, C]. Use x.reshape(len(x), -1).astype('float32') "
                "for other numbers"
            )
        if pixels.shape[3] not in (*PICTURE_CHANNELS, channels):
            raise UsageError(
                f"data: uint8 {list(x.shape)} are not images [N, H, W, C] with C 1 or 3. Use channels=C for another C"
            )
    else:
        pixels = to_float32(x, "the array")
    if labels is not None:
        labels = np.asarray(labels)
        if labels.dtype.kind not in "iu" or labels.shape != (len(x),):
            raise UsageError(f"data: labels are {labels.dtype} {list(labels.shape)}, expected integers [{len(x)}]")
        check_labels(labels, "the arrays", len(classes) or None)
        labels = labels.astype(np.int64)
    return Dataset(pixels, labels, resolve_class_names(labels, classes), compute_fingerprint(pixels, labels))


def describe_channels(channels: int) -> str:
    """Return a word for people: grey, RGB, or a number of channels."""
    return {1: "grey", 3: "RGB"}.get(channels, f"{channels} channels")


def describe_classes(labels: np.ndarray | None, classes: tuple[str, ...]) -> str:
    """Return a line for people: how many classes, and how many images each has."""
    if labels is None:
        return "no classes"
    counts = np.bincount(labels, minlength=len(classes))  # [K]

    def format_classes(class_ids: Iterable[int]) -> str:
        return ", ".join(f"{classes[label]} ({counts[label]:,})" for label in class_ids)

    if len(counts) <= _MAX_LISTED_CLASSES:
        unit = "class" if len(counts) == 1 else "classes"
        return f"{len(counts)} {unit}: {format_classes(range(len(counts)))}"
    order = np.argsort(counts, kind="stable")
    return (
        f"{len(counts):,} classes of {counts.min():,} to {counts.max():,} images; "
        f"smallest: {format_classes(order[:3])}; largest: {format_classes(order[:-4:-1])}"
    )


def header_sample(source: Source) -> np.ndarray:
    """Return the indices [n] of the images whose headers are read: all, or an even sample of a large set."""
    max_count = HEADER_SAMPLE if source.is_local else HEADER_SAMPLE_REMOTE
    return np.linspace(0, len(source) - 1, min(len(source), max_count)).astype(np.int64)


def load_data(
    location: str,
    *,
    resolution: int | str | None,
    channels: int | None = None,
    labels: LabelChoice = True,
    cache: CacheMode = "auto",
    max_bad_fraction: float = MAX_BAD_FRACTION,
    max_pixels: int | None = None,
    remote: RemoteOptions | None = None,
    value_range: str = AUTO,
    records: RecordOptions | None = None,
) -> Dataset:
    """Open and check a data set, and decode it, or prepare to decode images when they are needed.

    Every image is cropped to the largest part in its centre that has the shape of the resolution, such as a square, and
    resized to it with LANCZOS; an image of that size is unchanged, bit for bit. Transparency is composited on white,
    unless there are four channels. An image that cannot be decoded is replaced by
    another of its class (`BadSamples`).

    Args:
        location: `digits`, a file, a folder, or an address; see `open_source`.
        resolution: R for squares of R x R, or "WIDTHxHEIGHT". None takes the size of the images if all share one that
            every network accepts (square, a power of two from 8 on), else the power of two at or above the median of
            the short sides, at least 8 and at most 64. Of more than HEADER_SAMPLE images an even sample decides.
        channels: C. None takes 1 if every image is grey, else 3. Another number is that of the arrays of an .npz, .npy
            or .h5, or 4 for RGB and alpha of files.
        labels: False drops labels and classes; a str is the key or column that holds them.
        cache: `memory` decodes all images now, `stream` each when it is needed; `auto` is memory for local images of
            at most MAX_AUTO_CACHE_BYTES.
        max_bad_fraction: of all images may be bad.
        max_pixels: of an image; None is Pillow's limit of 89,478,485, or one that this process was given before.
        remote: options for remote storage.
        value_range: `data.range`, see `paragan.data.value_range`: the values of images with more than 8 bits that
            become 0 and 255.
        records: what is done to records of several arrays.

    Raises:
        UsageError: the path, format or range is wrong, the range is not certain, too many images are damaged, there is
            none, labels do not fit, or the pixels take more than half of the machine's memory.
    """
    size = None if resolution is None else check_resolution("resolution", resolution)
    check_channels("channels", channels)
    allow_pixels(max_pixels)
    range_option = parse_range(value_range)
    records = replace(records or RecordOptions(), channels=channels or 0, size=size)
    with _name_location(location):
        source = open_source(location, remote, labels=labels, channels=channels, records=records.selection)
        if isinstance(source, RecordSource):
            if range_option != AUTO:
                raise UsageError(f"data.range={value_range}: is for images, and the data are records. Leave it out")
            return _build_records(source, bool(labels), cache, max_bad_fraction, records)
        records.check_unused(source.location, source.sample_name(0))
        return _build_dataset(source, size, channels, labels, cache, max_bad_fraction, range_option)


@contextlib.contextmanager
def _name_location(location: str) -> Iterator[None]:
    """Raise UsageError for whatever keeps a data set from being read."""
    try:
        yield
    except RunError as error:
        raise UsageError(str(error)) from error
    except DecodeError as error:  # of the data set itself: a bad image would be replaced
        raise UsageError(f"data: {printable(redact_url(location))}: {error}: check the path or address") from None
    except OSError as error:
        name = printable(error.filename or redact_url(location))
        raise UsageError(
            f"data: {name} cannot be read: {error.strerror or error}; check path and permissions"
        ) from None


def _build_dataset(
    source: Source,
    size: ImageSize | None,
    channels: int | None,
    labels: LabelChoice,
    cache: CacheMode,
    max_bad_fraction: float,
    range_option: RangeOption,
) -> Dataset:
    numbers, classes = (source.labels, source.classes) if labels else (None, ())
    if source.array is not None and source.array.dtype == np.float32:
        if size or channels or cache == "stream" or range_option == FULL or isinstance(range_option, ValueRange):
            raise UsageError(
                f"data: {source.location} holds numbers, not images. Leave data.resolution, data.channels, data.range "
                "and data.cache=stream out"
            )
        encoding = source.encoding if isinstance(source, ArraySource) else None
        fingerprint = compute_fingerprint(source.array, numbers)
        return Dataset(source.array, numbers, classes, fingerprint, source.notes, encoding=encoding)
    bad_samples = BadSamples(numbers, len(source), source.sample_name, max_bad_fraction)
    scan = scan_headers(source, bad_samples)
    is_automatic = size is None
    if size is None:
        side = choose_resolution(scan.sizes)
        size = ImageSize(side, side)
    depth = channels or (1 if scan.is_grey else 3)
    check_channels_available(source, scan, depth)
    value_range = scan.values.resolve(range_option)
    notes = (
        *_describe_sizes(scan, size, is_automatic),
        *_describe_color(scan, depth),
        *scan.values.describe(value_range),
        *scan.notes,
        *source.notes,
    )
    streaming = StreamingImages(source, bad_samples, size, depth, value_range)
    if cache == "stream" or (cache == "auto" and (not source.is_local or streaming.nbytes > MAX_AUTO_CACHE_BYTES)):
        fingerprint = _streaming_fingerprint(streaming, numbers)
        notes = (*notes, "decoded when needed")
        return Dataset(streaming, numbers, classes, fingerprint, notes, bad_samples, value_range)
    images = streaming.read_all()
    notes = (*notes, *_describe_bad(bad_samples))
    fingerprint = compute_fingerprint(images, numbers)
    return Dataset(images, numbers, classes, fingerprint, notes, bad_samples, value_range)


def _build_records(
    source: RecordSource, has_labels: bool, cache: CacheMode, max_bad_fraction: float, options: RecordOptions
) -> Dataset:
    """Make a data set of records of several arrays."""
    labels, classes = (source.labels, source.classes) if has_labels else (None, ())
    bad_samples = BadSamples(labels, len(source), source.sample_name, max_bad_fraction, noun="record")
    records = open_records(source, bad_samples, options)
    notes = source.notes
    if cache == "auto":
        fits = source.is_local and estimate_bytes(records) <= MAX_AUTO_CACHE_BYTES
        cache = "memory" if fits else "stream"
    if cache == "memory":
        records = read_into_memory(records)
        notes = (*notes, *_describe_bad(bad_samples))
    elif not source.in_memory:
        notes = (*notes, "decoded when needed")
    return Dataset(records, labels, classes, _streaming_fingerprint(records, labels), notes, bad_samples)


def choose_resolution(sizes: np.ndarray) -> int:
    """Return the default resolution for images of `sizes` [N, 2] (width, height); see `load_data`."""
    first = int(sizes[0, 0])
    if (sizes == first).all() and first >= 8 and first.bit_count() == 1:
        return first
    median = int(np.ceil(np.median(sizes.min(axis=1))))
    return min(64, max(8, 1 << (median - 1).bit_length()))


def compute_fingerprint(images: np.ndarray, labels: np.ndarray | None) -> str:
    """Return 16 hex digits of the sha256 over shape, pixels [N, H, W, C] (or numbers) and labels [N]."""
    return _fingerprint(images.shape, [np.ascontiguousarray(images).reshape(-1).data], labels)


def _streaming_fingerprint(images: StreamingRows, labels: np.ndarray | None) -> str:
    """Return a fingerprint of names, sizes, checksums and options, which decodes nothing."""
    return _fingerprint(images.shape, images.fingerprint_parts(), labels)


def _fingerprint(shape: tuple[int, ...], parts: Iterable[bytes | memoryview], labels: np.ndarray | None) -> str:
    digest = hashlib.sha256(repr((shape, labels is not None)).encode())
    for part in parts:
        digest.update(part)
    if labels is not None:
        digest.update(np.ascontiguousarray(labels, dtype="<i8").view(np.uint8).data)
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class HeaderScan:
    """What the headers of the images say.

    sizes         : [n, 2] width and height of the images whose header can be read
    is_grey       : whether all are grey
    values        : of those images that were decoded to see the range of their values
    notes         : lines for `describe`
    bands         : numbers of channels of pixels that are no file; empty for files
    num_alpha     : of the files, how many may have transparency
    is_sample     : whether these are the headers of a part of the images
    """

    sizes: np.ndarray
    is_grey: bool
    values: ValueScan
    notes: tuple[str, ...] = ()
    bands: frozenset[int] = frozenset()
    num_alpha: int = 0
    is_sample: bool = False


def scan_headers(source: Source, bad_samples: BadSamples) -> HeaderScan:
    """Read the headers of all images, or of an even sample of a large set.

    Args:
        source: the images.
        bad_samples: gets the reasons if no header can be read.

    Raises:
        UsageError: no header can be read.
    """
    sample = np.arange(len(source)) if isinstance(source, DeepArraySource) else header_sample(source)
    positions = _value_sample(len(sample))
    if source.array is not None:
        count, height, width, channels = source.array.shape
        sizes = np.broadcast_to(np.array([width, height]), (count, 2))
        results = parallel_map(len(positions), lambda index: measure_record(source.read(int(sample[positions[index]]))))
        values = ValueScan(plain=tuple(image for image in results if isinstance(image, ImageValues)))
        return HeaderScan(sizes, channels == 1, values, bands=frozenset([channels]))
    results = _scan_records(source, sample, set(positions.tolist()))
    scanned = [result for result in results if not isinstance(result, DecodeFailure)]
    if not scanned:
        for failure in results:
            if isinstance(failure, DecodeFailure):
                bad_samples.reasons[int(sample[failure.index])] = failure.reason
        raise UsageError(bad_samples.error_message())
    headers = [header for header, _ in scanned]
    measured = [image for _, image in scanned if image is not None]
    values = ValueScan(
        deep=tuple(image for image in measured if not image.is_plain),
        plain=tuple(image for image in measured if image.is_plain),
    )
    is_sample = len(sample) < len(source)
    return HeaderScan(
        sizes=np.array([(header.width, header.height) for header in headers]),
        is_grey=all(header.is_grey for header in headers),
        values=values,
        notes=tuple(_describe_headers(headers, f" of {len(sample):,} sampled images" if is_sample else "")),
        bands=frozenset(header.bands for header in headers if header.bands),
        num_alpha=sum(header.has_alpha for header in headers),
        is_sample=is_sample,
    )


def scan_values(source: Source) -> ValueScan:
    """Return the values of images as `load_data` sees them to find their range; none if no image can be read."""
    try:
        return scan_headers(source, BadSamples(None, len(source), source.sample_name, 1.0)).values
    except UsageError:
        return ValueScan()


def _scan_records(
    source: Source, sample: np.ndarray, positions: set[int]
) -> list[tuple[Header, ImageValues | None] | DecodeFailure]:
    """Read the headers of the images `sample` [n], and the values of some.

    Values are those of `positions`; and where images have more than 8 bits, of all that are arrays, and of at most
    DEEP_SAMPLE files.
    """
    step = -(-len(sample) // DEEP_SAMPLE)

    def scan_record(position: int) -> tuple[Header, ImageValues | None]:
        record = source.read(int(sample[position]))
        header = read_header(record)
        is_measured = position in positions
        if header.dtype != np.uint8:
            is_measured = isinstance(record, np.ndarray) or position % step == 0
        if is_measured:
            with contextlib.suppress(DecodeError):  # it will be reported where the image is used
                return header, measure_record(record)
        return header, None

    return parallel_map(len(sample), scan_record, 0 if source.is_local else 32)


def _value_sample(count: int) -> np.ndarray:
    """Return the positions in `count` images of those whose values are looked at although they are 8-bit."""
    return np.unique(np.linspace(0, count - 1, min(count, PLAIN_SAMPLE)).astype(np.int64))


def _describe_headers(headers: Sequence[Header], of_sample: str) -> list[str]:
    """Return lines about what is done to some of the images."""
    effects = {
        "are CMYK, converted to RGB without their colour profile": [header.is_cmyk for header in headers],
        "are animations or have several pages, of which the first is used": [header.has_frames for header in headers],
    }
    return [f"{sum(found):,}{of_sample} {effect}" for effect, found in effects.items() if any(found)]


def check_channels_available(source: Source, scan: HeaderScan, channels: int) -> None:
    """Raise UsageError if the images do not have so many channels. Grey and RGB are converted to each other."""
    if channels in PICTURE_CHANNELS and scan.bands <= {*PICTURE_CHANNELS}:
        return
    if scan.bands:
        if scan.bands != {channels}:
            found = " and ".join(map(str, sorted(scan.bands)))
            remedy = "1 or 3" if scan.bands <= {*PICTURE_CHANNELS} else str(max(scan.bands))
            raise UsageError(f"data.channels={channels}: {source.location} has {found} channels. Use {remedy}")
    elif channels != 4:
        usable = "1, 3 or 4" if scan.num_alpha else "1 or 3"
        raise UsageError(
            f"data.channels={channels}: image files have 1 (grey), 3 (RGB) or 4 (RGB and alpha) channels. "
            f"Use {usable}, or store all channels in an .npz or .h5"
        )
    elif not scan.num_alpha:
        raise UsageError(f"data.channels=4: no image of {source.location} has transparency, the fourth channel. Use 3")


# Notes for `describe` ---------------------------------------------------------------------------------------


def _describe_bad(bad_samples: BadSamples) -> list[str]:
    count = len(bad_samples.reasons)
    if not count:
        return []
    first = bad_samples.to_lines()[0].replace("\t", ": ")
    if count == 1:
        return [f"1 cannot be decoded and is replaced by another of its class: {first}"]
    return [f"{count:,} cannot be decoded and are replaced by others of their class: {first}, ..."]


def _describe_sizes(scan: HeaderScan, size: ImageSize, is_automatic: bool) -> list[str]:
    short_sides = scan.sizes.min(axis=1)
    unique = np.unique(scan.sizes, axis=0)  # [k, 2]
    unique = unique[np.argsort(unique.prod(axis=1), kind="stable")]
    first = ImageSize(*unique[0].tolist())
    line = f"found {first.width} x {first.height}"
    if len(unique) > 1:
        max_width, max_height = unique[-1]
        line = f"found {len(unique):,} sizes, {first.width} x {first.height} to {max_width} x {max_height}"
        line += f", median short side {np.median(short_sides):g}"
    parts = [largest_part(ImageSize(*found), size) for found in unique.tolist()]
    changes: list[str] = []
    if any(part != (width, height) for part, (width, height) in zip(parts, unique.tolist())):
        changes.append("centre-cropped")
    if any(part != size for part in parts):
        changes.append(f"resized to {size} (LANCZOS)")
    lines = [f"{line}; {' and '.join(changes) or 'unchanged'}"]
    if is_automatic and changes:
        note = (
            f"resolution {size.resolution} is the default: the power of two at or above the median short side, "
            f"at least 8, at most 64; --data.resolution changes it"
        )
        if len(unique) == 1 and not first.is_square:
            note += f", such as --data.resolution={first.resolution} (WIDTHxHEIGHT)"
        lines.append(note)
    return lines


def _describe_color(scan: HeaderScan, channels: int) -> list[str]:
    count = len(scan.sizes)
    lines: list[str] = []
    if channels in PICTURE_CHANNELS and scan.is_grey != (channels == 1):
        lines.append("grey repeated to RGB" if scan.is_grey else "colour reduced to grey")
    of_sample = f" of {count:,} sampled images" if scan.is_sample else ""
    if scan.num_alpha and channels in PICTURE_CHANNELS:
        lines.append(f"{scan.num_alpha:,}{of_sample} may have transparency, which is composited on white")
    elif scan.num_alpha:
        lines.append("channels are red, green, blue and alpha")
        if scan.num_alpha < count:
            lines.append(f"{count - scan.num_alpha:,}{of_sample} have no transparency: their alpha is 255")
    if scan.is_sample:
        lines.append(f"sizes and colour are those of {count:,} images, evenly spaced")
    return lines
