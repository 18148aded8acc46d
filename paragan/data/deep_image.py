"""Read images with more than 8 bits a channel: 16-bit and 32-bit integers, floats.

Pillow opens 16-bit colour as 8-bit, from the high byte of each value. The low bytes come from reading the file once
more in the other byte order.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np
from PIL import Image

from paragan.data.source import DecodeError

_SWAPPED_ORDERS = {"16B": "16L", "16L": "16B", "16N": "16B" if sys.byteorder == "little" else "16L"}
_GREY_ALPHA = "LA;16B"  # which Pillow opens as RGBA
_COLORS = (_GREY_ALPHA[:2], "RGB", "RGBA")  # layouts of 16-bit colour that are read
_TIFF_BITS = 258
_TIFF_PHOTOMETRIC = 262
_TIFF_PLANAR = 284


def value_dtype(image: Image.Image) -> np.dtype:
    """Return the type of the values of an opened image that was not loaded yet; uint8 for plain images.

    Raises:
        DecodeError: it has more than 8 bits in a form that cannot be read.
    """
    layout, _, order = _rawmode(image).partition(";")
    if image.mode == "F":
        dtype = np.dtype(np.float32)
    elif image.mode == "I":
        dtype = np.dtype(np.uint16 if order == "16B" else np.int32)  # 16-bit grey PNGs of older versions of Pillow
    elif image.mode.startswith("I;"):
        dtype = np.dtype(np.uint16)
    elif order in _SWAPPED_ORDERS:
        dtype = np.dtype(np.uint16)
        if layout not in _COLORS:
            raise DecodeError(f"16 bits a channel of {layout} cannot be read: save it as RGB")
    else:
        dtype = np.dtype(np.uint8)
    _check_tiff(image, dtype)
    return dtype


def is_grey_alpha(image: Image.Image) -> bool:
    """Return whether an opened image is 16-bit grey with alpha."""
    return _rawmode(image) == _GREY_ALPHA


def read_values(image: Image.Image, data: bytes) -> np.ndarray:
    """Load an opened image whose type is not uint8.

    Args:
        image: the image, not loaded yet.
        data: its file.

    Returns:
        Values [H, W] (grey) or [H, W, C] as stored; C is 2 (grey and alpha), 3 (RGB) or 4 (RGB and alpha). A
        transparent colour of a PNG becomes alpha.
    """
    dtype = value_dtype(image)
    rawmode = _rawmode(image)
    order = rawmode.partition(";")[2]
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image).astype(dtype)
    elif rawmode == _GREY_ALPHA:
        _set_rawmode(image, "RGBA")  # four bytes a pixel, as they are
        values = np.asarray(image).view(">u2").astype(dtype)
    else:
        with Image.open(io.BytesIO(data), formats=[image.format or ""]) as other:
            _set_rawmode(other, rawmode.replace(order, _SWAPPED_ORDERS[order]))
            low_bytes = np.asarray(other)
        values = np.asarray(image).astype(dtype) << 8 | low_bytes
    transparent = image.info.get("transparency")
    if transparent is None or dtype != np.uint16:
        return values
    pixels = values.reshape(*values.shape[:2], -1)  # [H, W, C]
    alpha = np.where((pixels == np.array(transparent)).all(axis=2, keepdims=True), 0, 2**16 - 1)
    return np.concatenate([pixels, alpha.astype(dtype)], axis=2)


def _rawmode(image: Image.Image) -> str:
    """Return what Pillow calls the layout of the bytes of an image that was not loaded yet; "" if it does not say."""
    tiles: Any = getattr(image, "tile", None)
    args = tiles[0][3] if tiles else ""
    rawmode = args[0] if isinstance(args, tuple) and args else args
    return rawmode if isinstance(rawmode, str) else ""


def _set_rawmode(image: Any, rawmode: str) -> None:
    """Make Pillow load an image as another layout of bytes."""
    for index, tile in enumerate(image.tile):
        args = (rawmode, *tile[3][1:]) if isinstance(tile[3], tuple) else rawmode
        image.tile[index] = tile._replace(args=args) if hasattr(tile, "_replace") else (*tile[:3], args)


def _check_tiff(image: Any, dtype: np.dtype) -> None:
    """Raise `DecodeError` for a TIFF of more than 8 bits which Pillow would read wrongly."""
    tags = getattr(image, "tag_v2", None)
    if tags is None or max(tags.get(_TIFF_BITS, (1,))) <= 8:
        return
    if tags.get(_TIFF_PHOTOMETRIC) == 0:
        raise DecodeError("a TIFF of more than 8 bits in which 0 is white cannot be read: save it with 0 as black")
    if dtype == np.uint8 or (tags.get(_TIFF_PLANAR) == 2 and image.mode.startswith("RGB")):
        raise DecodeError("a TIFF of more than 8 bits in this layout cannot be read: save it as PNG")
