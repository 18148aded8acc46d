"""Decode image files into arrays of uint8 of one size, on all cores.

Conventions for all formats: EXIF orientation is applied, transparency is composited on white, CMYK becomes RGB without
its colour profile, an animation is its first frame and a TIFF its first page. Values of more than 8 bits are mapped by
a range (`value_range`). `center_crop_resize` takes the largest part in the centre that has the shape of the result,
such as a square, and resizes it with LANCZOS. Images of other than 1 or 3 channels are resized channel by channel; four
channels of a file are RGB and alpha, which is not composited then.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from paragan.core.errors import UsageError
from paragan.core.image_shape import PICTURE_CHANNELS, ImageSize
from paragan.data.deep_image import is_grey_alpha, read_values, value_dtype
from paragan.data.source import IMAGE_FORMATS, DecodeError, Record, Variation
from paragan.data.value_range import ImageValues, ValueRange, measure_values, to_8_bits

# What Pillow raises on damaged files, besides its own UnidentifiedImageError (an OSError).
_CORRUPTION_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
)

_ORIENTATION = 0x0112
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

DEFAULT_MAX_PIXELS = Image.MAX_IMAGE_PIXELS or 89_478_485

# Pillow warns of images that `open_image` rejects anyway, and of odd EXIF, which is ignored.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.")

T = TypeVar("T")

_JPEG_MAGIC = b"\xff\xd8\xff"
_EXIF_MARKER = b"Exif\0\0"
_ADOBE_MARKER = b"Adobe"
_QUANT_TABLE_MARKER = b"\xff\xdb"
_EXACT_COLORSPACES = ("YCbCr", "Gray")  # for which simplejpeg and Pillow decode to the same bits

_CHUNK_IMAGES = 64  # per task: with a future for each image, the futures of ImageNet would fill the memory


@dataclass(frozen=True)
class Header:
    """What a file says about its image before it is decoded.

    width, height : as stored, before EXIF rotation
    is_grey       : no colour in the mode or in the palette
    has_alpha     : it may have transparency
    dtype         : of its values; uint8 for plain images
    is_cmyk       : its colours are inks
    has_frames    : it has further frames or pages
    bands         : channels of pixels that are no file; 0 for a file
    """

    width: int
    height: int
    is_grey: bool
    has_alpha: bool
    dtype: np.dtype
    is_cmyk: bool = False
    has_frames: bool = False
    bands: int = 0


@dataclass(frozen=True)
class DecodeFailure:
    """Image `index` of a data set cannot be decoded, for `reason`."""

    index: int
    reason: str


def read_header(record: Record) -> Header:
    """Read the header of a record. Raises `DecodeError`."""
    if isinstance(record, np.ndarray):
        height, width = int(record.shape[0]), int(record.shape[1])
        bands = 1 if record.ndim == 2 else int(record.shape[2])
        return Header(width, height, is_grey=bands == 1, has_alpha=False, dtype=record.dtype, bands=bands)
    with open_image(record) as image:
        width, height = image.size
        return Header(
            width,
            height,
            is_grey=_is_grey(image),
            has_alpha=_has_alpha(image),
            dtype=value_dtype(image),
            is_cmyk=image.mode == "CMYK",
            has_frames=image.format != "JPEG" and getattr(image, "is_animated", False),  # of a photo: its thumbnail
        )


def decode_image(record: Record, value_range: ValueRange | None = None) -> Image.Image:
    """Decode a record: upright, opaque, in mode L or RGB, at its own size.

    Args:
        record: the image.
        value_range: the values that become 0 and 255; None if 8-bit images are expected.

    Raises:
        DecodeError: it cannot be decoded, or has more than 8 bits and no range.
    """
    changes_8_bit = value_range is not None and value_range.changes_8_bit
    if isinstance(record, np.ndarray):
        pixels = record if _is_plain(record) and not changes_8_bit else to_8_bits(record, value_range)
        return Image.fromarray(pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    if record.startswith(_JPEG_MAGIC) and not changes_8_bit and (jpeg := _decode_jpeg(record)):
        return jpeg
    with open_image(record) as image:
        if value_dtype(image) == np.uint8:
            image.load()
            opaque = _to_opaque(image, value_range if changes_8_bit else None)
        else:
            values = read_values(image, record)
            has_alpha = values.ndim == 3 and values.shape[2] != 3
            opaque = _to_opaque(Image.fromarray(to_8_bits(values, value_range, has_alpha)))
        transpose = _TRANSPOSES.get(exif_orientation(image))
        return opaque if transpose is None else opaque.transpose(transpose)


def decode_channels(record: Record, channels: int, value_range: ValueRange | None = None) -> np.ndarray:
    """Decode a record to all of its channels: [H, W, C] uint8, at its own size.

    Args:
        record: pixels of this number of channels, or a file, whose four channels are RGB and alpha (255: opaque).
        channels: C, other than 1 and 3.
        value_range: the values that become 0 and 255; None if 8-bit images are expected.

    Raises:
        DecodeError: it cannot be decoded, has another number of channels, or has more than 8 bits and no range.
    """
    changes_8_bit = value_range is not None and value_range.changes_8_bit
    if isinstance(record, np.ndarray):
        if record.ndim != 3 or record.shape[2] != channels:
            raise DecodeError(f"is {list(record.shape)}, which is not of {channels} channels")
        return record if _is_plain(record) and not changes_8_bit else to_8_bits(record, value_range)
    if channels != 4:
        raise DecodeError(f"a file has 1, 3 or 4 channels, not {channels}")
    with open_image(record) as image:
        transpose = _TRANSPOSES.get(exif_orientation(image))
        if value_dtype(image) == np.uint8:
            image.load()
            rgba = np.array((image if _has_alpha(image) else _to_opaque(image)).convert("RGBA"))
            if value_range is not None and changes_8_bit:
                rgba[..., :3] = value_range.to_uint8(rgba[..., :3])
        else:
            values = read_values(image, record)
            has_alpha = values.ndim == 3 and values.shape[2] != 3
            rgba = np.array(Image.fromarray(to_8_bits(values, value_range, has_alpha)).convert("RGBA"))
        return rgba if transpose is None else np.asarray(Image.fromarray(rgba).transpose(transpose))


def decode_into(record: Record, out: np.ndarray, value_range: ValueRange | None = None) -> None:
    """Decode a record, crop and resize it into `out` [H, W, C] uint8.

    The same as `decode_image` (which has the arguments and errors) and `center_crop_resize`, without a copy where
    possible.
    """
    height, width, channels = out.shape
    size = ImageSize(width, height)
    if value_range is not None and value_range.changes_8_bit:
        pass
    elif isinstance(record, np.ndarray):
        if record.shape == out.shape and _is_plain(record):
            out[:] = record
            return
    elif channels == 3 and record.startswith(_JPEG_MAGIC) and _decode_jpeg_into(record, out):
        return
    if channels in PICTURE_CHANNELS:
        out[:] = center_crop_resize(decode_image(record, value_range), size, channels)
        return
    out[:] = resize_channels(decode_channels(record, channels, value_range), size)


@dataclass(frozen=True)
class ImageDecoder:
    """Decodes images, and mirrors some.

    value_range : the values that become 0 and 255; None for 8-bit images
    """

    value_range: ValueRange | None = None

    def decode(self, record: Record, out: np.ndarray, variation: Variation = None) -> None:
        """Decode a record into `out` [H, W, C] uint8; flip it from left to right if `variation` is true."""
        decode_into(record, out, self.value_range)
        if variation:
            out[:] = out[:, ::-1].copy()


def measure_record(record: Record) -> ImageValues:
    """Return the extremes of the stored values of a record; of an 8-bit one as it is decoded. Raises `DecodeError`."""
    if isinstance(record, np.ndarray):
        return measure_values(record)
    with open_image(record) as image:
        if value_dtype(image) != np.uint8:
            values = read_values(image, record)
            has_alpha = values.ndim == 3 and values.shape[2] != 3
            return measure_values(values[..., :-1] if has_alpha else values)
    return measure_values(np.asarray(decode_image(record)))


def _is_plain(record: np.ndarray) -> bool:
    return record.dtype == np.uint8


def _decode_jpeg_into(data: bytes, out: np.ndarray) -> bool:
    """Decode a JPEG directly into `out` [H, W, 3]; return False if it has another size or is unusual."""
    if _may_have_orientation(data) or _may_be_cmyk(data):
        return False
    try:
        return simplejpeg.decode_jpeg(data, buffer=out).shape == out.shape
    except ValueError:  # too large for it, CMYK, or damaged: Pillow decides
        return False


def _may_have_orientation(data: bytes) -> bool:
    """Return whether a JPEG may have an EXIF orientation. EXIF precedes the first quantization table."""
    return data.find(_EXIF_MARKER, 0, data.find(_QUANT_TABLE_MARKER)) >= 0


def _may_be_cmyk(data: bytes) -> bool:
    """Return whether a JPEG may be CMYK (it has Adobe's marker), which simplejpeg decodes differently."""
    return data.find(_ADOBE_MARKER, 0, data.find(_QUANT_TABLE_MARKER)) >= 0


def _decode_jpeg(data: bytes) -> Image.Image | None:
    """Decode a JPEG with simplejpeg: Pillow's bits in a fraction of the time. Returns None if it is unusual."""
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
        if colorspace not in _EXACT_COLORSPACES or int(height) * int(width) > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        is_grey = colorspace == "Gray"
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if is_grey else "RGB")
    except ValueError:
        return None
    image = Image.fromarray(pixels[:, :, 0] if is_grey else pixels)
    if not _may_have_orientation(data):
        return image
    with open_image(data) as header:
        transpose = _TRANSPOSES.get(exif_orientation(header))
    return image if transpose is None else image.transpose(transpose)


def center_crop_resize(image: Image.Image, size: ImageSize, channels: int) -> np.ndarray:
    """Return the largest centred part of an image with the shape of `size`, resized with LANCZOS: [H, W, C] uint8.

    An image that has this size already is unchanged, bit for bit. Grey becomes RGB by repetition; RGB becomes grey by
    Pillow's "L" (ITU-R 601 luma).
    """
    image = image.convert("L" if channels == 1 else "RGB")
    part = largest_part(ImageSize(*image.size), size)
    if part != image.size:
        left, top = (image.width - part.width) // 2, (image.height - part.height) // 2
        image = image.crop((left, top, left + part.width, top + part.height))
    if part != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    return np.asarray(image).reshape(size.height, size.width, channels)


def resize_channels(pixels: np.ndarray, size: ImageSize) -> np.ndarray:
    """Return `center_crop_resize` of every channel of pixels [H, W, C]: [size.height, size.width, C] uint8."""
    channels = [Image.fromarray(np.ascontiguousarray(channel)) for channel in np.moveaxis(pixels, 2, 0)]
    return np.concatenate([center_crop_resize(channel, size, 1) for channel in channels], 2)


def largest_part(image: ImageSize, shape: ImageSize) -> ImageSize:
    """Return the size of the largest part of an image that has the proportions of `shape`, to the nearest pixel."""
    if image.width * shape.height > image.height * shape.width:
        width = (2 * image.height * shape.width + shape.height) // (2 * shape.height)
        return ImageSize(min(max(1, width), image.width), image.height)
    height = (2 * image.width * shape.height + shape.width) // (2 * shape.width)
    return ImageSize(image.width, min(max(1, height), image.height))


def parallel_map(count: int, work: Callable[[int], T], io_threads: int = 0) -> list[T | DecodeFailure]:
    """Return `[work(0), ..., work(count - 1)]`, with a `DecodeFailure` where `work` raises `DecodeError`.

    Args:
        count: number of calls.
        work: is called from many threads.
        io_threads: number of threads if `work` mostly waits; 0 for a thread per core.
    """
    step = 1 if io_threads else _CHUNK_IMAGES

    def run_chunk(start: int) -> list[T | DecodeFailure]:
        return [catch_decode_error(work, index) for index in range(start, min(start + step, count))]

    Image.init()  # imports Pillow's plugins now, not in several threads at once
    with decompression_bombs_as_errors(), ThreadPoolExecutor(io_threads or os.cpu_count()) as pool:
        return [result for part in pool.map(run_chunk, range(0, count, step)) for result in part]


def catch_decode_error(work: Callable[[int], T], index: int) -> T | DecodeFailure:
    """Return `work(index)`, or a `DecodeFailure` if it raises `DecodeError`."""
    try:
        return work(index)
    except DecodeError as error:
        return DecodeFailure(index, str(error))


def check_fits_memory(nbytes: int, what: str, remedy: str) -> None:
    """Check that data takes at most half of the memory of this machine.

    Args:
        nbytes: the memory it takes.
        what: what messages call it.
        remedy: what to do if it does not fit.

    Raises:
        UsageError: it does not fit.
    """
    limit = ram_bytes() // 2
    if nbytes > limit:
        raise UsageError(
            f"data: {what} needs {nbytes / 2**30:,.1f} GiB, more than half of this machine's "
            f"{2 * limit / 2**30:,.1f} GiB of memory: {remedy}"
        )


def check_images_fit_memory(count: int, size: ImageSize, channels: int) -> None:
    """Raise UsageError if images [count, H, W, C] uint8 take more than half of the memory of this machine."""
    limit = ram_bytes() // 2
    sizes = [size.fit_within(side) for side in (8, 16, 32, 64, 128, 256, 512, 1024)]
    if size.is_square:
        sizes = [ImageSize(side, side) for side in (8, 16, 32, 64, 128, 256, 512, 1024)]
    fitting = [smaller for smaller in sizes if count * smaller.pixels * channels <= limit]
    remedy = f"use resolution {fitting[-1].resolution} or less" if fitting else "use fewer images"
    what = f"{count:,} images of {size.width} x {size.height} x {channels}"
    check_fits_memory(count * size.pixels * channels, what, remedy)


def ram_bytes() -> int:
    """Return the memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def open_image(data: bytes) -> Iterator[Image.Image]:
    """Open an encoded image. Whatever Pillow raises while it is read becomes a `DecodeError`."""
    try:
        with Image.open(io.BytesIO(data), formats=sorted(set(IMAGE_FORMATS.values()))) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise Image.DecompressionBombError(f"({image.width * image.height} pixels)")
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DecodeError(_too_large_message(str(error))) from None
    except UnidentifiedImageError:
        raise DecodeError("not a PNG, JPEG, WebP, BMP, TIFF or GIF image") from None
    except _CORRUPTION_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DecodeError(" ".join(reason.split()) or type(error).__name__) from None


def _too_large_message(pillow_message: str) -> str:
    """Return why an image is too large, and what reads it nevertheless."""
    limit = Image.MAX_IMAGE_PIXELS or 0
    match = re.search(r"\((\d+) pixels\)", pillow_message)
    count = int(match[1]) if match else 2 * limit
    return (
        f"more than {limit:,} pixels, too many to decode unasked. If it is to be trusted, "
        f"--data.max_pixels={count} decodes it (`paragan data`: `--max-pixels {count}`)"
    )


def allow_pixels(max_pixels: int | None) -> None:
    """Let this process decode images of so many pixels; None, or fewer than before, changes nothing.

    The limit is Pillow's own, against small files that decode to large images. It is of the process, so that no data
    set that is being read loses images because another one is opened.
    """
    if max_pixels is not None and Image.MAX_IMAGE_PIXELS is not None:
        set_pixels_limit(max(max_pixels, Image.MAX_IMAGE_PIXELS))


def pixels_limit() -> int | None:
    """Return how many pixels an image may have in this process; None: any number."""
    return Image.MAX_IMAGE_PIXELS


def set_pixels_limit(max_pixels: int | None) -> None:
    """Set how many pixels an image may have in this process; None: any number."""
    Image.MAX_IMAGE_PIXELS = max_pixels


@contextmanager
def decompression_bombs_as_errors() -> Iterator[None]:
    """Make Pillow raise for images above its limit, up to twice of which it only warns; ignore warnings about EXIF."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def exif_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 (upright) if EXIF is damaged, as in any viewer."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _CORRUPTION_ERRORS:
        return 1


def _is_grey(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        palette = np.array(image.getpalette("RGB") or [0, 0, 0]).reshape(-1, 3)  # [colours, 3]
        return bool((palette == palette[:, :1]).all())
    return image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I") or is_grey_alpha(image)


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info


def _to_opaque(image: Image.Image, value_range: ValueRange | None = None) -> Image.Image:
    """Convert any 8-bit mode to L or RGB, with its colours mapped by a range, composited on white."""
    is_grey = _is_grey(image)
    has_alpha = _has_alpha(image)
    image = image.convert("RGBA" if has_alpha else "RGB")
    if value_range is not None:
        pixels = np.array(image)
        pixels[..., :3] = value_range.to_uint8(pixels[..., :3])
        image = Image.fromarray(pixels)
    if has_alpha:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image).convert("RGB")
    return image.convert("L") if is_grey else image  # grey values are the same after the conversion to RGB and back
