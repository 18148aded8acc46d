"""The interface of data sets: one class for each format in `formats`, opened by `open_source`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from paragan.core.errors import UsageError

LabelChoice = bool | str  # whether labels are read, or the key (or column) that holds them

# An encoded image (a whole PNG, JPEG, ... file), or pixels [H, W] or [H, W, C], uint8 or of another type of number.
Record = bytes | np.ndarray

# A record of several arrays: a file that holds all of them, or a file or an array for each field.
FieldRecord = Record | Mapping[str, bytes | np.ndarray]

RowKey = tuple[
    int, int, int, int
]  # seed, lane, position and row in the lane: what the random numbers of a row come from
Variation = bool | RowKey | None  # how a record is varied: an image is mirrored or not; others draw random numbers

IMAGE_FORMATS = {
    ".png": "PNG",
    ".jpg": "JPEG",
    ".jpeg": "JPEG",
    ".webp": "WEBP",
    ".bmp": "BMP",
    ".tif": "TIFF",
    ".tiff": "TIFF",
    ".gif": "GIF",
}


class Source(Protocol):
    """A labelled data set that reads only the records it is asked for. Safe to read from many threads.

    notes : lines for people: what was ignored, where an index came from, ...
    """

    notes: tuple[str, ...]

    @property
    def location(self) -> str:
        """What messages call it."""
        ...

    @property
    def labels(self) -> np.ndarray | None:
        """[N] int64 in 0..K-1; None without classes."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """[K] names; () without classes."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether a record is read at the speed of memory or disk, so that decoders read for themselves."""
        ...

    @property
    def array(self) -> np.ndarray | None:
        """[N, H, W, C] uint8, C 1 or 3, or numbers [N, ...] float32, if the data is an array already."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Return one record.

        Raises:
            DecodeError: it is damaged, or does not exist.
            RunError: it cannot be reached now, after all retries.
        """
        ...

    def sample_name(self, index: int) -> str:
        """Return what messages and bad_files.txt call image `index`: its path or address."""
        ...

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield what identifies the data without reading pixels: names, sizes, and checksums if there are any."""
        ...


class RowDecoder(Protocol):
    """Makes a row of a batch of a record. It is pickled and sent to decode processes."""

    def decode(self, record: Any, out: np.ndarray, variation: Variation = None) -> None:
        """Decode a record into `out` uint8, varied.

        Raises:
            DecodeError: it is damaged.
        """
        ...


class MalformedDataset(UsageError):
    """A data set that training does not accept although its images can be read, for `paragan data inspect`.

    Args:
        message: what is wrong.
        source: all of the images.
    """

    def __init__(self, message: str, source: Source):
        super().__init__(message)
        self.source = source


class NoImagesError(UsageError):
    """A folder or an archive that can be read, and holds no image."""


class DecodeError(Exception):
    """One image cannot be decoded. The message is the reason, without the name of the file."""
