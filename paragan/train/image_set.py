"""A set of images that is compared with another: opened, checked, and read at one size; or a file of its statistics.

    opened = open_image_set("fakes", "samples.npz", with_labels=False)
    scan = scan_sizes(opened)                                   # the headers of all images
    image_set = read_image_set(opened, resolution=32, channels=3)

Nothing is cropped, resized, converted or replaced without a request, because that changes scores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.data.bad_samples import BadSamples
from paragan.data.dataset import (
    MAX_AUTO_CACHE_BYTES,
    Dataset,
    compute_fingerprint,
    describe_channels,
    from_arrays,
    header_sample,
    scan_values,
)
from paragan.data.decode import DecodeFailure, Header, parallel_map, read_header
from paragan.data.formats.array import ArraySource
from paragan.data.formats.record_source import RecordSource
from paragan.data.open_source import open_checked_source
from paragan.data.source import Source
from paragan.data.storage.filesystem import printable, redact_url
from paragan.data.streaming import StreamingImages
from paragan.data.value_range import AUTO, RangeOption, ValueRange, ValueScan
from paragan.eval.feature_stats import FeatureStats
from paragan.eval.features import FeatureSpace

Side = Literal["reals", "fakes"]
ImageContent = str | Path | np.ndarray | Dataset

REMOTE_THREADS = 32
RUN_OPTIONS = {  # what messages about data suggest to a run -> the same for a comparison
    ", or allow more with --data.max_bad_fraction": "",
    "--data.range": "--range",
    "data.range": "range",
    "--data.labels=false": "--metrics fd,kid,prdc, which need no labels",
}


@dataclass(frozen=True, eq=False)
class OpenedImages:
    """Images of which nothing is read yet.

    side     : "reals" or "fakes", for messages
    location : their path or address, for messages
    source   : the records
    rows     : [N] indices in the source; None for all
    labels   : [N] int64 in 0..K-1; None without classes, or if nothing needs them
    classes  : [K] names
    range    : `data.range`, of images with more than 8 bits
    """

    side: Side
    location: str
    source: Source
    rows: np.ndarray | None
    labels: np.ndarray | None
    classes: tuple[str, ...]
    range: RangeOption = AUTO

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for people: what was ignored, which values became black and white, and the like."""
        return (*self.source.notes, *self._values.describe(self.value_range))

    @cached_property
    def value_range(self) -> ValueRange | None:
        """The stored values that become 0 and 255; None for 8-bit images and numbers."""
        with name_side(self.side):
            return self._values.resolve(self.range)

    @cached_property
    def _values(self) -> ValueScan:
        return ValueScan() if self.is_array else scan_values(self.source)

    @property
    def is_array(self) -> bool:
        """Return whether the records are float32 arrays rather than images."""
        return self.source.array is not None and self.source.array.dtype == np.float32


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images that can be scored.

    side          : "reals" or "fakes", for messages
    location      : their path or address
    images        : [N, H, W, C] uint8, in memory or read when they are indexed; or numbers [N, ...] float32
    labels        : [N] int64 in 0..K-1, or None
    fingerprint   : of shape, labels and pixels; of files, if they are streamed
    cache_key     : the fingerprint if it is of all content, else ""
    preprocessing : what was done to the images
    """

    side: Side
    location: str
    images: np.ndarray | StreamingImages
    labels: np.ndarray | None
    fingerprint: str
    cache_key: str
    preprocessing: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one record: (C, H, W), or that of the numbers."""
        shape = self.images.shape[1:]
        return shape if self.images.dtype == np.float32 else (shape[2], *shape[:2])

    def describe(self) -> str:
        """Return a line for people."""
        count = f"{len(self.images):,}"
        if self.images.dtype == np.float32:
            return f"{count} records of {' x '.join(map(str, self.shape))} numbers"
        channels, height, width = self.shape
        return f"{count} images, {ImageSize(width, height)}, {describe_channels(channels)}, {self.preprocessing}"


@dataclass(frozen=True)
class StatsFile:
    """A side that is a file with mu and sigma.

    stats       : its Gaussian, in the space that the file names
    fingerprint : of the file
    """

    side: Side
    path: Path
    stats: FeatureStats
    fingerprint: str

    @property
    def location(self) -> str:
        """Its path, for messages."""
        return str(self.path)

    @property
    def space(self) -> FeatureSpace:
        """The space that the file names."""
        return self.stats.space


OpenedSet = OpenedImages | StatsFile


class SizeScan(NamedTuple):
    """What the headers of a set say.

    smallest, largest : (width, height)
    is_grey           : whether all are grey
    notes             : lines for people
    """

    smallest: tuple[int, int]
    largest: tuple[int, int]
    is_grey: bool
    notes: tuple[str, ...] = ()


@contextlib.contextmanager
def name_side(side: Side) -> Iterator[None]:
    """Let messages about data name the side, and suggest what a comparison has."""
    try:
        yield
    except UsageError as error:
        text = str(error).removeprefix("data: ")
        for option, replacement in RUN_OPTIONS.items():
            text = text.replace(option, replacement)
        raise UsageError(f"{side}: {text}") from error


def open_image_set(
    side: Side, content: ImageContent, with_labels: bool, count: int = 0, value_range: RangeOption = AUTO
) -> OpenedImages:
    """Open images: a path or address as `--data` accepts it, arrays [N, H, W, C] uint8 or [N, ...] float, a Dataset.

    Args:
        side: which of the two sets it is, for messages.
        content: where or what they are.
        with_labels: whether labels are read.
        count: use so many, evenly spaced; 0 for all.
        value_range: `data.range`, of images with more than 8 bits.

    Raises:
        UsageError: there are none, they cannot be read, or they are fewer than `count`.
    """
    location = printable(redact_url(str(content))) if isinstance(content, str | Path) else "the array"
    with name_side(side):
        opened = _open_content(side, location, content, with_labels, value_range)
    size = len(opened)
    if count > size:
        raise UsageError(f"count={count}: {side} are {size} images in {location}. Use count={size} or less")
    if count in (0, size):
        return opened
    selected = np.linspace(0, size - 1, count).astype(np.int64)
    rows = selected if opened.rows is None else opened.rows[selected]
    return dataclasses.replace(opened, rows=rows, labels=None if opened.labels is None else opened.labels[selected])


def _open_content(
    side: Side, location: str, content: ImageContent, with_labels: bool, value_range: RangeOption
) -> OpenedImages:
    rows: np.ndarray | None = None
    if isinstance(content, np.ndarray):
        content = from_arrays(content)
    if not isinstance(content, Dataset):
        source = open_checked_source(str(content), labels=with_labels)
        if isinstance(source, RecordSource):
            raise UsageError(f"data: {location} holds records of several arrays. Save one as `x` of an .npz")
    elif isinstance(content.images, StreamingImages):
        source = content.images.source
        rows = content.images.rows
        value_range = content.value_range or value_range
    else:
        source = ArraySource(location, content.images[:])
    labelled = content if isinstance(content, Dataset) else source
    if not with_labels:
        return OpenedImages(side, location, source, rows, None, (), value_range)
    return OpenedImages(side, location, source, rows, labelled.labels, labelled.classes, value_range)


def scan_sizes(opened: OpenedImages) -> SizeScan:
    """Read the headers of all images; of remote ones those of an even sample.

    Raises:
        UsageError: a header cannot be read.
    """
    source = opened.source
    if source.array is not None:
        _, height, width, channels = source.array.shape
        return SizeScan((width, height), (width, height), channels == 1)
    rows = np.arange(len(source)) if opened.rows is None else opened.rows
    notes: tuple[str, ...] = ()
    if not source.is_local:
        sample = header_sample(source)
        if len(sample) < len(rows):
            notes = (f"{opened.side}: sizes and colour are those of {len(sample):,} images, evenly spaced",)
            rows = sample
    threads = 0 if source.is_local else REMOTE_THREADS
    results = parallel_map(len(rows), lambda index: read_header(source.read(int(rows[index]))), threads)
    failures = [result for result in results if isinstance(result, DecodeFailure)]
    if failures:
        first = failures[0]
        raise UsageError(
            f"{opened.side}: {source.sample_name(int(rows[first.index]))}: {first.reason}; {len(failures):,} of "
            f"{len(rows):,} images cannot be decoded. Use `paragan data convert FROM TO --skip-bad` to leave them out"
        )
    headers = [result for result in results if isinstance(result, Header)]
    sizes = sorted({(header.width, header.height) for header in headers}, key=lambda size: (size[0] * size[1], size))
    return SizeScan(sizes[0], sizes[-1], all(header.is_grey for header in headers), notes)


def read_image_set(opened: OpenedImages, resolution: int | str, channels: int, preprocessing: str) -> ImageSet:
    """Read images into memory, or prepare to read them when they are indexed if they take more than 2 GiB.

    Args:
        opened: the images, or numbers, for which the other arguments do not count.
        resolution: R, or "WIDTHxHEIGHT"; images of another size are cropped to the largest part of this shape in the
            centre and resized with Lanczos.
        channels: C, 1 (grey) or 3 (RGB).
        preprocessing: what that does to these images, for people.

    Raises:
        UsageError: an image cannot be decoded.
    """
    source = opened.source
    images: np.ndarray | StreamingImages
    if opened.is_array and source.array is not None:
        images = source.array if opened.rows is None else source.array[opened.rows]
    else:
        bad_samples = BadSamples(None, len(source), source.sample_name, 0.0)
        images = StreamingImages(source, bad_samples, ImageSize.of(resolution), channels, opened.value_range)
        images.rows = opened.rows
    if isinstance(images, StreamingImages) and source.is_local and images.nbytes <= MAX_AUTO_CACHE_BYTES:
        with name_side(opened.side):
            images = images.read_all()
    if isinstance(images, StreamingImages):
        fingerprint = _content_digest(images, opened.labels)
        cache_key = fingerprint if source.is_local else ""
    else:
        fingerprint = compute_fingerprint(images, opened.labels)
        cache_key = fingerprint
    return ImageSet(opened.side, opened.location, images, opened.labels, fingerprint, cache_key, preprocessing)


def _content_digest(images: StreamingImages, labels: np.ndarray | None) -> str:
    """Return 16 hex digits of the sha256 over shape, labels and all records as stored; of names and sizes if remote."""
    source = images.source
    digest = hashlib.sha256(repr((images.shape, labels is not None)).encode())
    if images.value_range is not None:
        digest.update(images.value_range.option.encode())
    if labels is not None:
        digest.update(np.ascontiguousarray(labels, "<i8").tobytes())
    if images.rows is not None:
        digest.update(np.ascontiguousarray(images.rows, "<i8").tobytes())
    if not source.is_local:
        for part in source.fingerprint_parts():
            digest.update(part)
        return digest.hexdigest()[:16]

    def hash_record(index: int) -> bytes:
        record = images.read_record(index)
        data = record if isinstance(record, bytes) else np.ascontiguousarray(record).tobytes()
        return hashlib.sha256(data).digest()

    for result in parallel_map(len(images), hash_record):
        digest.update(result if isinstance(result, bytes) else result.reason.encode())
    return digest.hexdigest()[:16]
