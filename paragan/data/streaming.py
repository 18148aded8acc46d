"""Images that are read, decoded and fitted when they are asked for."""

from __future__ import annotations

import copy
from typing import Any, overload

import numpy as np

from paragan.core.errors import Failed, Unusable
from paragan.data.bad_samples import Bad
from paragan.data.decode import Fault, each, place, refuse_beyond_memory
from paragan.data.source import DecodeError, Record, Source
from paragan.data.storage.filesystem import Plain


class Streamed:
    """[N, R, R, C] uint8, indexed like an array, though every image comes from its source at that moment."""

    dtype = np.dtype(np.uint8)

    def __init__(self, source: Source, bad: Bad, resolution: int, channels: int):
        self.source, self.bad, self.resolution, self.channels = source, bad, resolution, channels
        self.rows: np.ndarray | None = None  # [N] which of the source's, where not all

    def of_rows(self, rows: np.ndarray) -> Streamed:
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
        faults = each(len(flat), lambda i: self.into(int(flat[i]), out[i]))
        assert not any(isinstance(fault, Fault) for fault in faults)
        return out if np.ndim(chosen) else out[0]

    @property
    def plain(self) -> Plain | None:
        """The source, where its records lie as they are in files of this machine."""
        return self.source if self.source.near and isinstance(self.source, Plain) else None

    def fetch(self, index: int) -> Record:
        """The record of image `index`. Raises `DecodeError`: then `stand_in` has its pixels."""
        return self.source.read(self.at(index))

    def into(self, index: int, out: np.ndarray) -> None:
        """Image `index` to `out` [R, R, C], or who stands in for it."""
        try:
            place(self.fetch(index), out)
        except DecodeError as error:
            self.stand_in(index, str(error), out)

    def stand_in(self, index: int, reason: str, out: np.ndarray) -> None:
        """`out` gets another image of the same class, for one that is bad, and why. `Failed` beyond what may be."""
        at = self.at(index)
        self.bad.add(at, reason)
        for other in self.bad.stand_ins(at):
            try:
                return place(self.source.read(other), out)
            except DecodeError as error:
                self.bad.add(other, str(error))
        raise Failed(f"{self.bad.refusal()}; no image of its class is good")

    @overload
    def at(self, index: int) -> int: ...
    @overload
    def at(self, index: np.ndarray) -> np.ndarray: ...
    def at(self, index: int | np.ndarray) -> int | np.ndarray:
        """Which of the source's images `index` is, or which they are."""
        found = index if self.rows is None else self.rows[index]
        return found if isinstance(found, np.ndarray) else int(found)

    def all(self) -> np.ndarray:
        """All of them. Raises `Unusable` before anything is read where they take more than half of the memory."""
        whole = self.source.whole
        mapped = isinstance(whole, np.memmap)  # its file may be cut, and touching it would end the process
        if whole is not None and whole.shape == self.shape and not mapped:
            return np.ascontiguousarray(whole)
        refuse_beyond_memory(*self.shape)
        out = np.empty(self.shape, np.uint8)
        results = each(len(out), lambda index: place(self.fetch(index), out[index]))
        faults = [result for result in results if isinstance(result, Fault)]
        self.bad.reasons.update({self.at(fault.index): fault.reason for fault in faults})
        try:
            self.bad.refuse()
            for fault in faults:
                self.stand_in(fault.index, fault.reason, out[fault.index])
        except Failed as error:
            raise Unusable(str(error)) from None
        return out
