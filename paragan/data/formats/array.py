"""A set that is one array already."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import distribution

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.decode import ram_bytes


class ArraySource:
    """Images [N, H, W, C] uint8, C 1 or 3, in memory or mapped into it; or numbers of any shape, float32 [N, ...].

    mark : what tells them from others, where that is known without reading them all
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
    ):
        self.location, self.array, self.fingerprint = location, images, fingerprint
        self.labels, self.classes, self.notes = labels, classes, notes

    def __len__(self) -> int:
        return len(self.array)

    def read(self, index: int) -> np.ndarray:
        return self.array[index]

    def sample_name(self, index: int) -> str:
        return f"{self.location}, image {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        if self.fingerprint:
            yield self.fingerprint
            return
        yield repr(self.array.shape).encode()
        for image in self.array:
            yield image.tobytes()


def to_float32(x: np.ndarray, location: str) -> np.ndarray:
    """Numbers to train on as they are, [N, ...] float32. Unusable for another kind of array."""
    if x.dtype.kind != "f":
        raise UsageError(f"data: {location}: x is {x.dtype}, wanted floating point: x.astype(np.float32)")
    if x.ndim < 2 or 0 in x.shape:
        raise UsageError(
            f"data: {location}: x is {list(x.shape)}, wanted [N, ...], at least one number each: x[:, None]"
        )
    if 4 * x.size > ram_bytes() // 2:
        raise UsageError(
            f"data: {location}: x {list(x.shape)} needs more than half of this machine's memory: store less"
        )
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, np.float32)
    if bad := int((~np.isfinite(x)).sum()):
        raise UsageError(f"data: {location}: {bad:,} numbers of x are not finite as float32: leave those records out")
    return x


def load_digits() -> ArraySource:
    """scikit-learn's 1,797 handwritten digits of 8 x 8, grey."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")  # 64 in 0..16, the label; sklearn takes a second to import
    images = (rows[:, :-1] * 255 / 16).round().astype(np.uint8).reshape(-1, 8, 8, 1)
    return ArraySource("digits", images, rows[:, -1].astype(np.int64), tuple("0123456789"))
