"""A file that is read by requests for ranges of bytes, for libraries that read files."""

from __future__ import annotations

import io
from collections.abc import Callable


class RangeReader(io.RawIOBase):
    """A seekable file of `size` bytes. Every read calls `fetch(start, end)`, which returns these bytes."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]):
        self._size = size
        self._fetch = fetch
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        end = min(self._position + len(buffer), self._size)
        data = self._fetch(self._position, end) if end > self._position else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
