"""Write a data set in another format: `paragan data convert` and `paragan data shard`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from paragan.core.atomic_write import atomic_output, require_absent
from paragan.core.errors import RunError, UsageError
from paragan.core.image_shape import PICTURE_CHANNELS, ImageSize, check_channels, check_resolution
from paragan.core.philox import epoch_permutation
from paragan.data.bad_samples import BadSamples
from paragan.data.dataset import check_channels_available, choose_resolution, scan_headers, scan_values
from paragan.data.decode import (
    DecodeFailure,
    center_crop_resize,
    decode_channels,
    decode_image,
    decode_into,
    read_header,
    resize_channels,
)
from paragan.data.source import Record, Source
from paragan.data.storage.filesystem import format_error
from paragan.data.tools.image_info import detect_format, is_rotated
from paragan.data.tools.inspect_dataset import no_good_image_message
from paragan.data.tools.parallel_map import ProgressFn, ordered_parallel_map
from paragan.data.tools.writers import DatasetInfo, OutputFormat
from paragan.data.value_range import AUTO, ValueRange, parse_range


@dataclass(frozen=True)
class ConvertOptions:
    """How images are written.

    resolution : R of squares, or "WIDTHxHEIGHT"; None keeps files unchanged, and gives pixels the size that all images
                 share, or the resolution that training would use
    channels   : None for grey or RGB, as training would; or all channels of arrays, or 4 for RGB and alpha of files
    encoding   : of files; None keeps files of the right size, byte for byte, and encodes others as PNG
    quality    : of JPEG, 1 to 100, without chroma subsampling
    labels     : whether to write them
    skip_bad   : leave out images that cannot be decoded, instead of an error
    shuffle    : seed of a random order; None keeps the order
    range      : `data.range`; images with more than 8 bits are copied by `auto`, and written as 8-bit by any other
    """

    resolution: int | str | None = None
    channels: int | None = None
    encoding: Literal["png", "jpg"] | None = None
    quality: int = 95
    labels: bool = True
    skip_bad: bool = False
    shuffle: int | None = None
    range: str = AUTO

    def copies_deep(self, value_range: ValueRange) -> bool:
        """Return whether files with more than 8 bits are copied: all or none of a set, or `auto` would find less."""
        return not value_range.clips and self.resolution is None and self.encoding is None

    @property
    def size(self) -> ImageSize | None:
        """Width and height of the result; None if they are not asked for."""
        return None if self.resolution is None else check_resolution("--resolution", self.resolution)

    def __post_init__(self):
        _ = self.size  # raises
        check_channels("--channels", self.channels)
        if self.shuffle is not None and not 0 <= self.shuffle < 2**63:
            raise UsageError(f"--shuffle={self.shuffle}: not a seed. Use 0 or more, and less than 2^63.")
        if not 1 <= self.quality <= 100:
            raise UsageError(f"--quality={self.quality}: out of range. Use 1 to 100, such as 95.")


@dataclass(frozen=True, eq=False)
class ConvertResult:
    """What was written.

    count       : images
    shape       : (H, W, C) if they are pixels
    bad_samples : images that were left out
    notes       : lines for people
    """

    count: int
    shape: tuple[int, int, int] | None
    bad_samples: BadSamples
    notes: tuple[str, ...]


def convert(
    source: Source,
    out: Path,
    output_format: OutputFormat,
    options: ConvertOptions,
    *,
    progress: ProgressFn | None = None,
    finalize: Callable[[Path], object] | None = None,
) -> ConvertResult:
    """Write all images of a source, in its order. Every image is decoded on the way.

    The output appears complete or not at all. Images that were left out are listed in `out.bad.txt`.

    Args:
        source: the images.
        out: the file or folder to write; must not exist.
        output_format: its format.
        options: how images are written.
        progress: is called with the number of images done, and of all.
        finalize: is called with the temporary path before it is renamed, to add files to it.

    Raises:
        UsageError: `out` exists or cannot be written, an image cannot be decoded, or the format cannot hold the data.
        RunError: writing failed.
    """
    require_absent(out)
    bad_samples = BadSamples(None, len(source), source.sample_name, 1.0)
    scan = scan_values(source)
    value_range = scan.resolve(parse_range(options.range))
    rows = _good_indices(source, value_range, bad_samples, progress) if options.skip_bad else np.arange(len(source))
    if options.shuffle is not None:
        rows = rows[epoch_permutation(options.shuffle, 0, len(rows))]
    labels = source.labels[rows] if options.labels and source.labels is not None else None
    shape = _output_shape(source, options, output_format)
    info = DatasetInfo(len(rows), labels, source.classes if labels is not None else (), shape)
    _check_empty_classes(output_format, info)

    def make_record(row: int) -> Record:
        record = source.read(int(rows[row]))
        return encode_record(record, options, value_range) if shape is None else _pixels(record, shape, value_range)

    with _reraise_as_run_error(out), atomic_output(out) as temporary:
        writer = output_format.make_writer(temporary, info)
        try:
            records = ordered_parallel_map(len(rows), make_record, is_local=source.is_local, progress=progress)
            with closing(records):
                for index, record in zip(rows, records):
                    if isinstance(record, DecodeFailure):
                        raise UsageError(_bad_image_message(source.sample_name(int(index)), record.reason))
                    writer.add(record)
        finally:
            writer.close()
        if finalize:
            finalize(temporary)
        if bad_samples.reasons:
            _write_bad_list(out.with_name(f"{out.name}.bad.txt"), bad_samples)
    notes = scan.describe(value_range)
    if value_range is not None and shape is None and options.copies_deep(value_range):
        notes = [f"files with more than 8 bits are copied; training maps {value_range} to 0:255"]
    return ConvertResult(len(rows), shape, bad_samples, (*notes, *_describe_order(output_format, info)))


def _pixels(record: Record, shape: tuple[int, int, int], value_range: ValueRange | None) -> np.ndarray:
    pixels = np.empty(shape, np.uint8)
    decode_into(record, pixels, value_range)
    return pixels


def _write_bad_list(path: Path, bad_samples: BadSamples) -> None:
    with atomic_output(path) as temporary:
        temporary.write_text("\n".join(bad_samples.to_lines()) + "\n", errors="surrogateescape")


@contextmanager
def _reraise_as_run_error(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else format_error(error)
        raise RunError(f"{out} cannot be written: {reason}: make room, or name another place") from None


def encode_record(record: Record, options: ConvertOptions, value_range: ValueRange | None = None) -> bytes:
    """Return a record as an image file: the same bytes if it has the right size and encoding.

    Raises:
        DecodeError: it cannot be decoded, also if its bytes would be kept.
    """
    if options.channels is None or options.channels in PICTURE_CHANNELS:
        image = decode_image(record, value_range)
        channels = options.channels or (1 if image.mode == "L" else 3)
        is_converted = image.mode != {1: "L", 3: "RGB"}[channels]
    else:
        image = Image.fromarray(decode_channels(record, options.channels, value_range))
        channels = options.channels
        is_converted = False
    if isinstance(record, bytes) and not is_converted and _is_encoded(record, options, value_range):
        return record
    size = options.size or ImageSize(*image.size)
    pixels = resize_channels(np.asarray(image), size) if channels == 4 else center_crop_resize(image, size, channels)
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)  # without EXIF: it was applied
    file = io.BytesIO()
    if options.encoding == "jpg":
        image.save(file, "JPEG", quality=options.quality, subsampling=0)
    else:
        image.save(file, "PNG")
    return file.getvalue()


def _is_encoded(record: bytes, options: ConvertOptions, value_range: ValueRange | None) -> bool:
    if value_range is not None:
        is_plain = read_header(record).dtype == np.uint8
        if value_range.changes_8_bit if is_plain else not options.copies_deep(value_range):
            return False
    if options.encoding and detect_format(record) != {"png": "PNG", "jpg": "JPEG"}[options.encoding]:
        return False
    if not options.size:
        return True
    header = read_header(record)
    return (header.width, header.height) == options.size and not is_rotated(record)


def _good_indices(
    source: Source, value_range: ValueRange | None, bad_samples: BadSamples, progress: ProgressFn | None
) -> np.ndarray:
    """Decode all images; return the indices [n] of those that can be decoded, and report the others."""

    def try_decode(index: int) -> None:
        record = source.read(index)
        if isinstance(record, bytes) or record.ndim == 2 or record.shape[2] in PICTURE_CHANNELS:
            decode_image(record, value_range)

    results = ordered_parallel_map(len(source), try_decode, is_local=source.is_local, progress=progress)
    for index, result in enumerate(results):
        if isinstance(result, DecodeFailure):
            bad_samples.report(index, result.reason)
    if len(bad_samples.reasons) == len(source):
        raise UsageError(no_good_image_message(source, bad_samples.reasons))
    return np.setdiff1d(np.arange(len(source)), list(bad_samples.reasons))


def _output_shape(source: Source, options: ConvertOptions, output_format: OutputFormat) -> tuple[int, int, int] | None:
    """Return the shape (H, W, C) of all images: their own if they share one size, else that of `load_data`.

    None for formats that store files, after a check that these can hold the channels.
    """
    if not output_format.stores_pixels:
        return _check_file_channels(source, options)
    scan = scan_headers(source, BadSamples(None, len(source), source.sample_name, 1.0))
    size = options.size
    if size is None and (scan.sizes == scan.sizes[0]).all():
        size = ImageSize(*scan.sizes[0].tolist())
    if size is None:
        side = choose_resolution(scan.sizes)
        size = ImageSize(side, side)
    channels = options.channels or (1 if scan.is_grey else 3)
    check_channels_available(source, scan, channels)
    return size.height, size.width, channels


def _check_file_channels(source: Source, options: ConvertOptions) -> None:
    """Raise UsageError if files cannot hold the channels that are asked for, or the images do not have them."""
    if options.channels is None:
        return
    if options.channels not in (*PICTURE_CHANNELS, 4):
        raise UsageError(f"--channels={options.channels}: files hold 1, 3 or 4 channels. Use an .npz or .h5")
    if options.channels == 4 and options.encoding == "jpg":
        raise UsageError("--channels=4: a JPEG has no transparency. Use --format png")
    scan = scan_headers(source, BadSamples(None, len(source), source.sample_name, 1.0))
    check_channels_available(source, scan, options.channels)


def _check_empty_classes(output_format: OutputFormat, info: DatasetInfo) -> None:
    if output_format.allows_empty_classes or info.labels is None:
        return
    counts = np.bincount(info.labels, minlength=len(info.classes))
    if not counts.all():
        name = info.classes[int(counts.argmin())]
        raise UsageError(
            f"data: class {name!r} has no image, which a {output_format.name} cannot store. Use .npz or --no-labels"
        )


def _bad_image_message(name: str, reason: str) -> str:
    return (
        f"data: {name} cannot be decoded: {reason}: replace or remove it, or leave out all such with --skip-bad "
        "(`paragan data inspect` lists them)"
    )


def _describe_order(output_format: OutputFormat, info: DatasetInfo) -> tuple[str, ...]:
    if output_format.name != "folder" or info.labels is None or (np.diff(info.labels) >= 0).all():
        return ()
    return ("a folder stores its images class by class, in their order within each class",)
