"""Data that is one array: the base of several formats, arrays from Python, and the digits of the package."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.image_encoding import ImageEncoding
from paragan.core.image_shape import MAX_CHANNELS, PICTURE_CHANNELS, channels_option
from paragan.data.decode import check_fits_memory


class ArraySource:
    """A `Source` over an array.

    Args:
        location: what messages call it.
        images: [N, H, W, C] uint8, in memory or memory-mapped; or numbers of any shape, float32 [N, ...].
        labels: [N] int64 in 0..K-1, or None.
        classes: [K] names.
        notes: lines for `describe`.
        fingerprint: identifies the data, if that is known without reading all of it.
        encoding: of numbers that are latents of images, what decodes them.
    """

    is_local = True

    def __init__(
        self,
        location: str,
        images: np.ndarray,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
        fingerprint: bytes = b"",
        encoding: ImageEncoding | None = None,
    ):
        self.location = location
        self.array = images
        self.encoding = encoding
        self.labels = labels
        self.classes = classes
        self.notes = notes
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self.array)

    def read(self, index: int) -> np.ndarray:
        """Return the pixels [H, W, C] of image `index`."""
        return self.array[index]

    def sample_name(self, index: int) -> str:
        """Return what messages call image `index`."""
        return f"{self.location}, image {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield the fingerprint, or else the shape and all pixels."""
        if self.fingerprint:
            yield self.fingerprint
            return
        yield repr(self.array.shape).encode()
        for image in self.array:
            yield image.tobytes()


class DeepArraySource:
    """Images of another type than uint8 in memory.

    Args:
        location: what messages call it.
        values: [N, H, W, C] integers or floats.
        labels: [N] int64 in 0..K-1, or None.
        classes: [K] names.
        notes: lines for `describe`.
    """

    is_local = True
    array = None

    def __init__(
        self,
        location: str,
        values: np.ndarray,
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ):
        self.location = location
        self.values = values
        self.labels = labels
        self.classes = classes
        self.notes = notes

    def __len__(self) -> int:
        return len(self.values)

    def read(self, index: int) -> np.ndarray:
        """Return the values [H, W, C] of image `index`."""
        return self.values[index]

    def sample_name(self, index: int) -> str:
        """Return what messages call image `index`."""
        return f"{self.location}, image {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield the type, the shape and all values."""
        yield f"{self.values.dtype} {self.values.shape}".encode()
        for image in self.values:
            yield image.tobytes()


def make_image_source(
    location: str,
    images: np.ndarray,
    labels: np.ndarray | None = None,
    classes: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> ArraySource | DeepArraySource:
    """Return a source of images [N, H, W, C] or [N, H, W] of any type of number in memory; of bool, true is white."""
    images = np.ascontiguousarray(images).reshape(*images.shape[:3], -1)
    if images.dtype == bool:
        images = images.astype(np.uint8) * 255
        notes = (*notes, "images are bool: false becomes 0, true 255")
    if images.dtype == np.uint8:
        return ArraySource(location, images, labels, classes, notes)
    images = images.astype(images.dtype.newbyteorder("="), copy=False)
    return DeepArraySource(location, images, labels, classes, notes)


def to_float32(x: np.ndarray, location: str) -> np.ndarray:
    """Return numbers to train on, [N, ...] float32.

    Args:
        x: [N, ...] of a floating-point type.
        location: what messages call it.

    Raises:
        UsageError: another type or shape, values that are not finite, or too large for the memory.
    """
    if x.dtype.kind != "f":
        raise UsageError(f"data: {location}: x is {x.dtype}, expected floating point: x.astype(np.float32)")
    if x.ndim < 2 or 0 in x.shape:
        raise UsageError(
            f"data: {location}: x is {list(x.shape)}, expected [N, ...], at least one number each: x[:, None]"
        )
    check_fits_memory(4 * x.size, f"{location}: x {list(x.shape)}", "store less")
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, np.float32)
    if bad := int((~np.isfinite(x)).sum()):
        raise UsageError(f"data: {location}: {bad:,} numbers of x are not finite as float32. Leave those records out")
    return x


def check_image_shape(shape: tuple[int, ...], location: str, key: str, channels: int | None) -> None:
    """Check that an array holds images, [N, H, W, C] or [N, H, W].

    Args:
        shape: of the array.
        location: what messages call the file.
        key: what messages call the array.
        channels: C, if it is neither 1 nor 3.

    Raises:
        UsageError: it has another shape; says how to move the channels, or which option reads them.
    """
    if 0 in shape:
        raise UsageError(f"data: {location}: {key} are {list(shape)}, no image. Give at least one")
    if len(shape) == 3 or (len(shape) == 4 and shape[3] in (*PICTURE_CHANNELS, channels)):
        return
    what = f"{location}: {key} are {list(shape)}"
    if len(shape) == 4 and (shape[1] in (*PICTURE_CHANNELS, channels) or shape[1] < min(shape[2:])):
        option = "" if shape[1] in PICTURE_CHANNELS else f", and {channels_option(shape[1])} reads all of them"
        raise UsageError(f"data: {what}, expected [N, H, W, C]: {key}.transpose(0, 2, 3, 1) moves the channels{option}")
    is_possible = len(shape) == 4 and shape[3] <= MAX_CHANNELS
    option = f". Use {channels_option(shape[3])} to read all" if is_possible else ""
    raise UsageError(f"data: {what}, expected [N, H, W, C] with C 1 or 3, or [N, H, W]{option}")


def load_digits() -> ArraySource:
    """Load 1,797 handwritten digits, 8 x 8, grey.

    Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998 (CC BY 4.0):
    its test set. The file is scikit-learn's.
    """
    rows = np.loadtxt(Path(__file__).with_name("digits.csv.gz"), dtype=np.uint8, delimiter=",")  # 64 of 0..16, label
    images = (rows[:, :-1].astype(np.float64) * 255 / 16).round().astype(np.uint8).reshape(-1, 8, 8, 1)
    return ArraySource("digits", images, rows[:, -1].astype(np.int64), tuple("0123456789"))
