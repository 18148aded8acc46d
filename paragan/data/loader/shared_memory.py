"""Memory shared with worker processes, in blocks."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

SPARE_BLOCKS = 2  # free blocks that keep their memory


@dataclass(frozen=True, eq=False)
class MemoryBlock:
    """A block of a `SharedArena`.

    offset : of its first byte in the file
    array  : its contents, uint8
    memory : its map
    """

    offset: int
    array: np.ndarray
    memory: mmap.mmap


class SharedArena:
    """A file without a name that grows by blocks. It disappears with the last process that has it open.

    Args:
        page_lock: page-locks a block for as long as it lives, so that a device copies from it asynchronously.
    """

    def __init__(self, page_lock: Callable[[np.ndarray], None] | None = None):
        self.fd = _create_anonymous_file()
        self._page_lock = page_lock
        self._size = 0
        self._free: list[MemoryBlock] = []
        weakref.finalize(self, os.close, self.fd)

    def allocate(self, shape: tuple[int, ...]) -> MemoryBlock:
        """Return a block of uint8 in this shape, with undefined contents."""
        for number in reversed(range(len(self._free))):  # what was released last is still in the CPU's cache
            if self._free[number].array.shape == shape:
                return self._free.pop(number)
        size = int(np.prod(shape))
        offset = self._size
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.fd, self._size)
        memory = mmap.mmap(self.fd, size, offset=offset)
        array = np.frombuffer(memory, np.uint8)
        if self._page_lock:
            self._page_lock(array)
        return MemoryBlock(offset, array.reshape(shape), memory)

    def release(self, block: MemoryBlock) -> None:
        """Free a block for reuse. Unless page-locked, the memory of all but SPARE_BLOCKS goes back to the system."""
        self._free.append(block)
        if len(self._free) > SPARE_BLOCKS and not self._page_lock and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # not supported by the system
                self._free[-SPARE_BLOCKS - 1].memory.madvise(mmap.MADV_REMOVE)


class AttachedArena:
    """A `SharedArena` in another process.

    Args:
        fd: file descriptor of the arena.
    """

    def __init__(self, fd: int):
        self._fd = fd
        self._memory = mmap.mmap(-1, 1)

    def view(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the uint8 array of this shape at `offset`."""
        size = int(np.prod(shape))
        if offset + size > len(self._memory):  # the file has grown
            self._memory = mmap.mmap(self._fd, 0)
        return np.frombuffer(self._memory, np.uint8, size, offset).reshape(shape)


def _create_anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("paragan")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
