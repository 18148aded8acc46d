"""What one image is, as it lies there and once decoded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import ImageStat

from paragan.data.decode import decode_image, exif_orientation, open_image, read_header
from paragan.data.source import Record

MAGIC_BYTES = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"RIFF": "WEBP", b"BM": "BMP"}
FORMAT_SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "BMP": ".bmp"}
MODE_NAMES = {"1": "black and white", "L": "grey", "LA": "grey with alpha", "P": "palette", "PA": "palette with alpha"}

_FLAT_STDDEV = 2.0  # of 255: the standard deviation, in every channel, below which an image shows next to nothing
_PNG_BIT_DEPTH_OFFSET = 24  # where a PNG says how many bits a channel has


@dataclass(frozen=True)
class ImageInfo:
    """An image that can be decoded.

    width, height : upright
    form   : JPEG, PNG, WEBP, BMP, or "pixels" for what is no file
    mode   : its colours, in words: "grey", "RGB", "palette", "CMYK", "grey, 16 bit", ...
    grey   : as training sees it
    turned : by EXIF;  clear: a pixel is not opaque;  flat: next to constant
    nbytes : as it lies there
    digest : 16 bytes, the same for the same decoded pixels
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
    """The format of a record, by its first bytes."""
    if isinstance(record, np.ndarray):
        return "pixels"
    return next((form for start, form in MAGIC_BYTES.items() if record.startswith(start)), "unknown")


def is_rotated(record: Record) -> bool:
    """Whether EXIF has it turned. Raises `DecodeError`."""
    if isinstance(record, np.ndarray):
        return False
    with open_image(record) as image:
        return exif_orientation(image) != 1


def inspect_image(record: Record) -> ImageInfo:
    """Decode an image and say what it is. Raises `DecodeError`."""
    about, image = read_header(record), decode_image(record)
    pixels = image.convert("RGB").tobytes()  # grey is the same image, whichever way it is stored
    digest = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
    digest.update(pixels)
    return ImageInfo(
        *image.size,
        file_format=detect_format(record),
        mode=_mode_name(record),
        is_grey=about.is_grey,
        is_rotated=is_rotated(record),
        has_alpha=about.has_alpha and _has_transparent_pixel(record),
        is_flat=max(ImageStat.Stat(image).stddev) < _FLAT_STDDEV,
        nbytes=record.nbytes if isinstance(record, np.ndarray) else len(record),
        digest=digest.digest(),
    )


def _has_transparent_pixel(record: Record) -> bool:
    """Whether a pixel is not opaque. (Grey of 16 bits is always opaque: what its file says of transparency is not
    applied.)"""
    if isinstance(record, np.ndarray):
        return False
    with open_image(record) as image:
        return not image.mode.startswith("I") and image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def _mode_name(record: Record) -> str:
    if isinstance(record, np.ndarray):
        return "grey" if record.ndim == 2 or record.shape[2] == 1 else "RGB"
    with open_image(record) as image:
        mode = image.mode
    if mode.startswith("I"):
        return "grey, 16 bit"
    deep = record.startswith(b"\x89PNG") and record[_PNG_BIT_DEPTH_OFFSET] == 16
    return MODE_NAMES.get(mode, mode) + ", 16 bit" * deep
