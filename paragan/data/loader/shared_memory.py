"""Memory that this process and those it starts see alike."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

SPARE_BLOCKS = 2  # pieces that keep their memory while they are not used


@dataclass(frozen=True, eq=False)
class MemoryBlock:
    """A piece of it. at : of its first byte;  array : its contents"""

    offset: int
    array: np.ndarray
    memory: mmap.mmap


class SharedArena:
    """A file without a name, grown by pieces: nothing is left of it, however this ends.

    pinned : pieces are such that a CUDA device copies from them by itself
    """

    def __init__(self, *, pinned: bool = False):
        self.fd, self.pinned, self._size = _create_anonymous_file(), pinned, 0  # file: its descriptor
        weakref.finalize(self, os.close, self.fd)
        self._free: list[MemoryBlock] = []

    def allocate(self, shape: tuple[int, ...]) -> MemoryBlock:
        """A piece of uint8 in this shape; of unknown contents."""
        for place in reversed(range(len(self._free))):  # what was released last is still in the processor's cache
            if self._free[place].array.shape == shape:
                return self._free.pop(place)
        size, at = int(np.prod(shape)), self._size
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.fd, self._size)
        memory = mmap.mmap(self.fd, size, offset=at)
        array = np.frombuffer(memory, np.uint8)
        if self.pinned:
            _pin_memory(array)
        return MemoryBlock(at, array.reshape(shape), memory)

    def release(self, block: MemoryBlock) -> None:
        """For another of its shape. The memory of all but the last few is given back, unless it is pinned."""
        self._free.append(block)
        if len(self._free) > SPARE_BLOCKS and not self.pinned and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # a system that cannot
                self._free[-SPARE_BLOCKS - 1].memory.madvise(mmap.MADV_REMOVE)


class AttachedArena:
    """Such a file, as another process sees it."""

    def __init__(self, fd: int):
        self._fd, self._memory = fd, mmap.mmap(-1, 1)

    def view(self, offset: int, shape: tuple[int, ...]) -> np.ndarray:
        """The uint8 from there on, in this shape."""
        size = int(np.prod(shape))
        if offset + size > len(self._memory):
            self._memory = mmap.mmap(self._fd, 0)
        return np.frombuffer(self._memory, np.uint8, size, offset).reshape(shape)


def _pin_memory(array: np.ndarray) -> None:
    """Until nobody knows it any more. No test has done this: it needs a CUDA device."""
    import torch  # not needed, and slow to import, where another process sees such memory

    runtime: Any = torch.cuda.cudart()
    at = array.ctypes.data
    torch.cuda.check_error(int(runtime.cudaHostRegister(at, array.nbytes, 0)))
    weakref.finalize(array, runtime.cudaHostUnregister, at).atexit = False


def _create_anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("paragan")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
