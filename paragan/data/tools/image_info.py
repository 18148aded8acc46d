"""Properties of one image, encoded and decoded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import ImageStat

from paragan.core.image_shape import PICTURE_CHANNELS
from paragan.data.decode import decode_channels, decode_image, exif_orientation, open_image, read_header
from paragan.data.deep_image import is_grey_alpha, read_values, value_dtype
from paragan.data.source import Record
from paragan.data.value_range import ValueRange

MAGIC_BYTES = {
    **dict.fromkeys((b"II*\0", b"MM\0*"), "TIFF"),
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"RIFF": "WEBP",
    b"BM": "BMP",
    b"GIF8": "GIF",
}
FORMAT_SUFFIXES = {
    "PNG": ".png",
    "JPEG": ".jpg",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "TIFF": ".tif",
    "GIF": ".gif",
}
MODE_NAMES = {"1": "black and white", "L": "grey", "LA": "grey with alpha", "P": "palette", "PA": "palette with alpha"}

_TYPE_NAMES = {np.dtype(np.uint16): "16 bit", np.dtype(np.float32): "float"}  # of values of other types: their name
_FLAT_STDDEV = 2.0  # of 255: an image is almost constant if the standard deviation of every channel is below this


@dataclass(frozen=True)
class ImageInfo:
    """An image that can be decoded.

    width, height : after EXIF rotation
    file_format   : JPEG, PNG, WEBP, BMP, TIFF, GIF, or "pixels" if it is not a file
    mode          : its colours, in words: "grey", "RGB", "palette", "CMYK", "grey, 16 bit", ...
    is_grey       : as training sees it
    is_rotated    : by EXIF
    has_alpha     : a pixel is not opaque
    is_flat       : almost constant
    nbytes        : encoded
    digest        : 16 bytes, equal for equal decoded pixels
    """

    width: int
    height: int
    file_format: str
    mode: str
    is_grey: bool
    is_rotated: bool
    has_alpha: bool
    is_flat: bool
    nbytes: int
    digest: bytes


def detect_format(record: Record) -> str:
    """Return the format of a record by its first bytes: JPEG, PNG, WEBP, BMP, TIFF, GIF, "pixels" or "unknown"."""
    if isinstance(record, np.ndarray):
        return "pixels"
    return next((name for magic, name in MAGIC_BYTES.items() if record.startswith(magic)), "unknown")


def is_rotated(record: Record) -> bool:
    """Return whether EXIF rotates or flips a record. Raises `DecodeError`."""
    if isinstance(record, np.ndarray):
        return False
    with open_image(record) as image:
        return exif_orientation(image) != 1


def inspect_image(record: Record, value_range: ValueRange | None = None) -> ImageInfo:
    """Decode an image by a range and return its properties. Raises `DecodeError`."""
    header = read_header(record)
    if isinstance(record, np.ndarray) and header.bands not in (0, *PICTURE_CHANNELS):
        return _inspect_bands(record, value_range)
    image = decode_image(record, value_range)
    return ImageInfo(
        *image.size,
        file_format=detect_format(record),
        mode=_mode_name(record),
        is_grey=header.is_grey,
        is_rotated=is_rotated(record),
        has_alpha=header.has_alpha and _has_transparent_pixel(record),
        is_flat=max(ImageStat.Stat(image).stddev) < _FLAT_STDDEV,
        nbytes=record.nbytes if isinstance(record, np.ndarray) else len(record),
        digest=_digest(image.size, image.convert("RGB").tobytes()),  # the same whether stored as grey or as RGB
    )


def _inspect_bands(record: np.ndarray, value_range: ValueRange | None) -> ImageInfo:
    """Return the properties of pixels [H, W, C] that are neither grey nor RGB."""
    height, width, bands = record.shape
    pixels = decode_channels(record, bands, value_range)
    return ImageInfo(
        width,
        height,
        file_format=detect_format(record),
        mode=_mode_name(record),
        is_grey=False,
        is_rotated=False,
        has_alpha=False,
        is_flat=bool(pixels.reshape(-1, bands).std(0).max() < _FLAT_STDDEV),
        nbytes=record.nbytes,
        digest=_digest((width, height), pixels.tobytes()),
    )


def _digest(size: tuple[int, int], pixels: bytes) -> bytes:
    digest = hashlib.blake2b(repr(size).encode(), digest_size=16)
    digest.update(pixels)
    return digest.digest()


def _has_transparent_pixel(record: Record) -> bool:
    """Return whether a pixel is not opaque."""
    if isinstance(record, np.ndarray):
        return False
    with open_image(record) as image:
        if value_dtype(image) != np.uint8:  # only 16-bit images have alpha beside colours
            values = read_values(image, record)
            return values.ndim == 3 and values.shape[2] != 3 and int(values[..., -1].min()) < 2**16 - 1
        return image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def _mode_name(record: Record) -> str:
    if isinstance(record, np.ndarray):
        bands = 1 if record.ndim == 2 else record.shape[2]
        name = {1: "grey", 3: "RGB"}.get(bands, f"{bands} channels")
        dtype = record.dtype
    else:
        with open_image(record) as image:
            dtype = value_dtype(image)
            mode = "LA" if is_grey_alpha(image) else image.mode
        name = "grey" if mode == "F" or mode.startswith("I") else MODE_NAMES.get(mode, mode)
    return name if dtype == np.uint8 else f"{name}, {_TYPE_NAMES.get(dtype, str(dtype))}"
