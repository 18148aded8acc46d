"""A set of images where it lies: one class a format, in `sources/`, found by `find.py`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    pass

Record = bytes | np.ndarray  # an encoded image (a whole PNG, JPEG, ... file), or pixels uint8 [H, W] or [H, W, C]


class Source(Protocol):
    """A labelled set of images, of which nothing is read but what is asked for. Safe to read from many threads.

    where   : what messages call it
    labels  : [N] int64 in 0..K-1; None without classes
    classes : [K] names; () without
    notes   : what was found, a line each, for people
    near    : whether a record comes at the speed of this machine's memory or disk, so that whoever decodes it may as
              well fetch it
    whole   : [N, H, W, C] uint8, C 1 or 3, where the set is an array in memory already; or numbers, float32 [N, ...]
    """

    @property
    def location(self) -> str: ...
    @property
    def labels(self) -> np.ndarray | None: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    @property
    def is_local(self) -> bool: ...
    @property
    def array(self) -> np.ndarray | None: ...
    def __len__(self) -> int: ...

    def read(self, index: int) -> Record:
        """One record. Raises `DecodeError` where it is damaged or gone for good, and `Failed` where it cannot be
        reached now, after everything was tried."""
        ...

    def sample_name(self, index: int) -> str:
        """What messages and bad_files.txt call image `index`: its path or address."""
        ...

    def fingerprint_parts(self) -> Iterable[bytes]:
        """What tells this set from others without reading its pixels: names, sizes, checksums where there are any."""
        ...


class MalformedDataset(UsageError):
    """A set that training refuses, though its images are there; `source` is all of them, to be looked at."""

    def __init__(self, message: str, source: Source):
        super().__init__(message)
        self.source = source


IMAGE_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}


class DecodeError(Exception):
    """One image cannot be decoded; the message is the reason, without the file's name."""
