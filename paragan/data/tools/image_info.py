"""What one image is, as it lies there and once decoded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from PIL import ImageStat

from paragan.data.decode import header, opened, orientation, picture
from paragan.data.source import Record

STARTS = {b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"RIFF": "WEBP", b"BM": "BMP"}
SUFFIXES = {"PNG": ".png", "JPEG": ".jpg", "WEBP": ".webp", "BMP": ".bmp"}
MODES = {"1": "black and white", "L": "grey", "LA": "grey with alpha", "P": "palette", "PA": "palette with alpha"}

_FLAT = 2.0  # of 255: the standard deviation, in every channel, below which an image shows next to nothing
_DEPTH = 24  # where a PNG says how many bits a channel has


@dataclass(frozen=True)
class Look:
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
    form: str
    mode: str
    grey: bool
    turned: bool
    clear: bool
    flat: bool
    nbytes: int
    digest: bytes


def form_of(record: Record) -> str:
    """The format of a record, by its first bytes."""
    if isinstance(record, np.ndarray):
        return "pixels"
    return next((form for start, form in STARTS.items() if record.startswith(start)), "unknown")


def turned(record: Record) -> bool:
    """Whether EXIF has it turned. Raises `DecodeError`."""
    if isinstance(record, np.ndarray):
        return False
    with opened(record) as image:
        return orientation(image) != 1


def look(record: Record) -> Look:
    """Decode an image and say what it is. Raises `DecodeError`."""
    about, image = header(record), picture(record)
    pixels = image.convert("RGB").tobytes()  # grey is the same image, whichever way it is stored
    digest = hashlib.blake2b(repr(image.size).encode(), digest_size=16)
    digest.update(pixels)
    return Look(
        *image.size,
        form=form_of(record),
        mode=_mode(record),
        grey=about.grey,
        turned=turned(record),
        clear=about.clear and _clear(record),
        flat=max(ImageStat.Stat(image).stddev) < _FLAT,
        nbytes=record.nbytes if isinstance(record, np.ndarray) else len(record),
        digest=digest.digest(),
    )


def _clear(record: Record) -> bool:
    """Whether a pixel is not opaque. (Grey of 16 bits is always opaque: what its file says of transparency is not
    applied.)"""
    if isinstance(record, np.ndarray):
        return False
    with opened(record) as image:
        return not image.mode.startswith("I") and image.convert("RGBA").getchannel("A").getextrema() != (255, 255)


def _mode(record: Record) -> str:
    if isinstance(record, np.ndarray):
        return "grey" if record.ndim == 2 or record.shape[2] == 1 else "RGB"
    with opened(record) as image:
        mode = image.mode
    if mode.startswith("I"):
        return "grey, 16 bit"
    deep = record.startswith(b"\x89PNG") and record[_DEPTH] == 16
    return MODES.get(mode, mode) + ", 16 bit" * deep
