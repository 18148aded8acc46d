"""Images that are read, decoded and fitted when they are asked for."""

from __future__ import annotations

import copy
from typing import Any, overload

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.data.bad_samples import BadSamples
from paragan.data.decode import DecodeFailure, check_fits_memory, decode_into, parallel_map
from paragan.data.source import DecodeError, Record, Source
from paragan.data.storage.filesystem import SeekableSource


class StreamingImages:
    """[N, R, R, C] uint8, indexed like an array, though every image comes from its source at that moment."""

    dtype = np.dtype(np.uint8)

    def __init__(self, source: Source, bad_samples: BadSamples, resolution: int, channels: int):
        self.source, self.bad_samples, self.resolution, self.channels = source, bad_samples, resolution, channels
        self.rows: np.ndarray | None = None  # [N] which of the source's, where not all

    def subset(self, rows: np.ndarray) -> StreamingImages:
        """Some of them, as a set of its own."""
        mine = copy.copy(self)
        mine.rows = rows if self.rows is None else self.rows[rows]
        return mine

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self), self.resolution, self.resolution, self.channels

    @property
    def nbytes(self) -> int:
        """What they would take in memory."""
        return len(self) * self.resolution * self.resolution * self.channels

    def __getitem__(self, index: Any) -> np.ndarray:
        """[n, R, R, C]: of an array of indices, a mask or a slice; [R, R, C] of a number."""
        chosen = np.arange(len(self))[index]
        out = np.empty((np.size(chosen), *self.shape[1:]), np.uint8)
        flat = np.atleast_1d(chosen)
        faults = parallel_map(len(flat), lambda i: self.read_into(int(flat[i]), out[i]))
        assert not any(isinstance(fault, DecodeFailure) for fault in faults)
        return out if np.ndim(chosen) else out[0]

    @property
    def seekable_source(self) -> SeekableSource | None:
        """The source, where its records lie as they are in files of this machine."""
        return self.source if self.source.is_local and isinstance(self.source, SeekableSource) else None

    def read_record(self, index: int) -> Record:
        """The record of image `index`. Raises `DecodeError`: then `stand_in` has its pixels."""
        return self.source.read(self.source_index(index))

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Image `index` to `out` [R, R, C], or who stands in for it."""
        try:
            decode_into(self.read_record(index), out)
        except DecodeError as error:
            self.substitute(index, str(error), out)

    def substitute(self, index: int, reason: str, out: np.ndarray) -> None:
        """`out` gets another image of the same class, for one that is bad, and why. `Failed` beyond what may be."""
        at = self.source_index(index)
        self.bad_samples.report(at, reason)
        for other in self.bad_samples.replacements(at):
            try:
                return decode_into(self.source.read(other), out)
            except DecodeError as error:
                self.bad_samples.report(other, str(error))
        raise RunError(f"{self.bad_samples.error_message()}; no image of its class is good")

    @overload
    def source_index(self, index: int) -> int: ...
    @overload
    def source_index(self, index: np.ndarray) -> np.ndarray: ...
    def source_index(self, index: int | np.ndarray) -> int | np.ndarray:
        """Which of the source's images `index` is, or which they are."""
        found = index if self.rows is None else self.rows[index]
        return found if isinstance(found, np.ndarray) else int(found)

    def read_all(self) -> np.ndarray:
        """All of them. Raises `Unusable` before anything is read where they take more than half of the memory."""
        whole = self.source.array
        mapped = isinstance(whole, np.memmap)  # its file may be cut, and touching it would end the process
        if whole is not None and whole.shape == self.shape and not mapped:
            return np.ascontiguousarray(whole)
        check_fits_memory(*self.shape)
        out = np.empty(self.shape, np.uint8)
        results = parallel_map(len(out), lambda index: decode_into(self.read_record(index), out[index]))
        faults = [result for result in results if isinstance(result, DecodeFailure)]
        self.bad_samples.reasons.update({self.source_index(fault.index): fault.reason for fault in faults})
        try:
            self.bad_samples.check_limit()
            for fault in faults:
                self.substitute(fault.index, fault.reason, out[fault.index])
        except RunError as error:
            raise UsageError(str(error)) from None
        return out
