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

SPARE = 2  # pieces that keep their memory while they are not used


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of it. at : of its first byte;  array : its contents"""

    at: int
    array: np.ndarray
    memory: mmap.mmap


class Shared:
    """A file without a name, grown by pieces: nothing is left of it, however this ends.

    pinned : pieces are such that a CUDA device copies from them by itself
    """

    def __init__(self, *, pinned: bool = False):
        self.file, self.pinned, self._size = _file(), pinned, 0  # file: its descriptor
        weakref.finalize(self, os.close, self.file)
        self._free: list[Piece] = []

    def piece(self, shape: tuple[int, ...]) -> Piece:
        """A piece of uint8 in this shape; of unknown contents."""
        for place in reversed(range(len(self._free))):  # what was released last is still in the processor's cache
            if self._free[place].array.shape == shape:
                return self._free.pop(place)
        size, at = int(np.prod(shape)), self._size
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        os.ftruncate(self.file, self._size)
        memory = mmap.mmap(self.file, size, offset=at)
        array = np.frombuffer(memory, np.uint8)
        if self.pinned:
            _pin(array)
        return Piece(at, array.reshape(shape), memory)

    def release(self, piece: Piece) -> None:
        """For another of its shape. The memory of all but the last few is given back, unless it is pinned."""
        self._free.append(piece)
        if len(self._free) > SPARE and not self.pinned and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # a system that cannot
                self._free[-SPARE - 1].memory.madvise(mmap.MADV_REMOVE)


class Seen:
    """Such a file, as another process sees it."""

    def __init__(self, file: int):
        self._file, self._memory = file, mmap.mmap(-1, 1)

    def array(self, at: int, shape: tuple[int, ...]) -> np.ndarray:
        """The uint8 from there on, in this shape."""
        size = int(np.prod(shape))
        if at + size > len(self._memory):
            self._memory = mmap.mmap(self._file, 0)
        return np.frombuffer(self._memory, np.uint8, size, at).reshape(shape)


def _pin(array: np.ndarray) -> None:
    """Until nobody knows it any more. No test has done this: it needs a CUDA device."""
    import torch  # not needed, and slow to import, where another process sees such memory

    runtime: Any = torch.cuda.cudart()
    at = array.ctypes.data
    torch.cuda.check_error(int(runtime.cudaHostRegister(at, array.nbytes, 0)))
    weakref.finalize(array, runtime.cudaHostUnregister, at).atexit = False


def _file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("paragan")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
