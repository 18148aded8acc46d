"""Image files to squares of uint8, on all cores.

Declared once, here: EXIF orientation is applied; transparency is composited on white; of 16 bits the high
byte is kept; of an animation the first frame; `fit` crops to the largest square in the centre and resizes
with LANCZOS.
"""

import io
import math
import os
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
from paragan.data.source import IMAGE_FORMATS, DecodeError, Record

# What Pillow raises on damaged files, beside its own UnidentifiedImageError (an OSError).
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

# Pillow warns of images that are refused here anyway, and of odd EXIF, which turns nothing.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
warnings.filterwarnings("ignore", module=r"PIL\.")

T = TypeVar("T")

_JPEG_MAGIC, _EXIF_MARKER, _ADOBE_MARKER, _QUANT_TABLE_MARKER = b"\xff\xd8\xff", b"Exif\0\0", b"Adobe", b"\xff\xdb"
_EXACT_COLORSPACES = ("YCbCr", "Gray")  # colours of which simplejpeg and Pillow make the same bits

_CHUNK_IMAGES = 64  # images a task: one future an image would itself fill the memory at ImageNet's size


@dataclass(frozen=True)
class Header:
    """What a file says about its image before it is decoded. Sizes are as stored, before any turn by EXIF."""

    width: int
    height: int
    is_grey: bool  # no colour in the mode, or none in the palette
    has_alpha: bool  # some transparency may be in it


@dataclass(frozen=True)
class DecodeFailure:
    """Image `index` of a set cannot be decoded, and why."""

    index: int
    reason: str


def read_header(record: Record) -> Header:
    """Read what a record says about its image. Raises `DecodeError`."""
    if isinstance(record, np.ndarray):
        height, width = int(record.shape[0]), int(record.shape[1])
        return Header(width, height, is_grey=record.ndim == 2 or record.shape[2] == 1, has_alpha=False)
    with open_image(record) as image:
        width, height = image.size
        return Header(width, height, is_grey=_is_grey(image), has_alpha=_has_alpha(image))


def decode_image(record: Record) -> Image.Image:
    """Decode a record: upright, opaque, in mode L or RGB, at its own size. Raises `DecodeError`."""
    if isinstance(record, np.ndarray):
        return Image.fromarray(record[:, :, 0] if record.ndim == 3 and record.shape[2] == 1 else record)
    if record.startswith(_JPEG_MAGIC) and (fast := _decode_jpeg(record)):
        return fast
    with open_image(record) as image:
        image.load()
        turn = _TRANSPOSES.get(exif_orientation(image))
        plain = _to_opaque(image)
        return plain if turn is None else plain.transpose(turn)


def decode_into(record: Record, out: np.ndarray) -> None:
    """Decode a record and fit it into `out` [R, R, C] uint8, as `picture` and `fit` do. Raises `DecodeError`."""
    resolution, _, channels = out.shape
    if isinstance(record, np.ndarray):
        if record.shape == out.shape:
            out[:] = record
            return
    elif channels == 3 and record.startswith(_JPEG_MAGIC) and _decode_jpeg_into(record, out):
        return
    out[:] = center_crop_resize(decode_image(record), resolution, channels)


def _decode_jpeg_into(data: bytes, out: np.ndarray) -> bool:
    """Decode a JPEG into `out` [R, R, 3] without a detour; False if it has another size or is unusual."""
    if _may_have_orientation(data) or _may_be_cmyk(data):
        return False
    try:
        return simplejpeg.decode_jpeg(data, buffer=out).shape == out.shape
    except ValueError:  # too large for it, CMYK, or damaged: Pillow has the last word
        return False


def _may_have_orientation(data: bytes) -> bool:
    """Whether a JPEG may have an EXIF orientation: EXIF stands before its first table."""
    return data.find(_EXIF_MARKER, 0, data.find(_QUANT_TABLE_MARKER)) >= 0


def _may_be_cmyk(data: bytes) -> bool:
    """Whether a JPEG may be CMYK, of which simplejpeg makes other bits: then Adobe's marker stands there too."""
    return data.find(_ADOBE_MARKER, 0, data.find(_QUANT_TABLE_MARKER)) >= 0


def _decode_jpeg(data: bytes) -> Image.Image | None:
    """A JPEG by simplejpeg, bit for bit what Pillow makes of it, in a fraction of the time; None if it is unusual."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours not in _EXACT_COLORSPACES or int(height) * int(width) > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        grey = colours == "Gray"
        pixels = simplejpeg.decode_jpeg(data, "GRAY" if grey else "RGB")
    except ValueError:
        return None
    image = Image.fromarray(pixels[:, :, 0] if grey else pixels)
    if not _may_have_orientation(data):
        return image
    with open_image(data) as about:
        turn = _TRANSPOSES.get(exif_orientation(about))
    return image if turn is None else image.transpose(turn)


def center_crop_resize(image: Image.Image, resolution: int, channels: int) -> np.ndarray:
    """The largest centred square of `image`, resized with LANCZOS: [R, R, C] uint8.

    An image that has the size already is untouched, bit for bit. Grey becomes RGB by repetition; RGB becomes
    grey by Pillow's "L" (ITU-R 601 luma).
    """
    image = image.convert("L" if channels == 1 else "RGB")
    side = min(image.size)
    if image.width != image.height:
        left, top = (image.width - side) // 2, (image.height - side) // 2
        image = image.crop((left, top, left + side, top + side))
    if side != resolution:
        image = image.resize((resolution, resolution), Image.Resampling.LANCZOS)
    return np.asarray(image).reshape(resolution, resolution, channels)


def parallel_map(count: int, work: Callable[[int], T], io_threads: int = 0) -> list[T | DecodeFailure]:
    """`[work(0), ..., work(count - 1)]`, on all cores; a `Fault` where `work` raises `DecodeError`.

    waiting : how many at once, where work is mostly waiting
    """
    step = 1 if io_threads else _CHUNK_IMAGES

    def run_chunk(start: int) -> list[T | DecodeFailure]:
        return [catch_decode_error(work, index) for index in range(start, min(start + step, count))]

    Image.init()  # the plugins are imported here, not by several threads at once
    with decompression_bombs_as_errors(), ThreadPoolExecutor(io_threads or os.cpu_count()) as pool:
        return [result for part in pool.map(run_chunk, range(0, count, step)) for result in part]


def catch_decode_error(work: Callable[[int], T], index: int) -> T | DecodeFailure:
    """`work(index)`, or that it cannot be decoded, and why."""
    try:
        return work(index)
    except DecodeError as error:
        return DecodeFailure(index, str(error))


def check_fits_memory(count: int, height: int, width: int, channels: int) -> None:
    """Raise `Unusable` if [count, height, width, channels] uint8 take more than half of the memory."""
    need, limit = count * height * width * channels, ram_bytes() // 2
    if need <= limit:
        return
    sides = [side for side in (8, 16, 32, 64, 128, 256, 512, 1024) if count * side * side * channels <= limit]
    remedy = f"use resolution {sides[-1]} or less" if sides else "use fewer images"
    raise UsageError(
        f"data: {count:,} images of {width} x {height} x {channels} need {need / 2**30:,.1f} GiB, "
        f"more than half of this machine's {2 * limit / 2**30:,.1f} GiB of memory: {remedy}"
    )


def ram_bytes() -> int:
    """The memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def open_image(data: bytes) -> Iterator[Image.Image]:
    """An encoded image, with everything Pillow may raise while it is read turned into `DecodeError`."""
    try:
        with Image.open(io.BytesIO(data), formats=sorted(set(IMAGE_FORMATS.values()))) as image:
            if image.width * image.height > (Image.MAX_IMAGE_PIXELS or math.inf):
                raise Image.DecompressionBombError
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise DecodeError(f"more than {Image.MAX_IMAGE_PIXELS or 0:,} pixels, too many to decode safely") from None
    except UnidentifiedImageError:
        raise DecodeError("not a PNG, JPEG, WebP or BMP image") from None
    except _CORRUPTION_ERRORS as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise DecodeError(" ".join(reason.split()) or type(error).__name__) from None


@contextmanager
def decompression_bombs_as_errors() -> Iterator[None]:
    """Pillow only warns of images up to twice too large. Its other warnings are about EXIF, not pixels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


def exif_orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; unreadable EXIF turns nothing, as in any viewer."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except _CORRUPTION_ERRORS:
        return 1


def _is_grey(image: Image.Image) -> bool:
    if image.mode in ("P", "PA"):
        palette = np.array(image.getpalette("RGB") or [0, 0, 0]).reshape(-1, 3)  # [colours, 3]
        return bool((palette == palette[:, :1]).all())
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I")


def _has_alpha(image: Image.Image) -> bool:
    return image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info


def _to_opaque(image: Image.Image) -> Image.Image:
    """Any mode to L or RGB, opaque."""
    if image.mode.startswith("I"):  # 16-bit grey: its high byte, which is what Pillow keeps of 16-bit colour
        return Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    grey = _is_grey(image)
    if _has_alpha(image):
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB").convert("L") if grey else image.convert("RGB")  # grey survives the detour exactly
