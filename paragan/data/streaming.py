"""Images that are read and decoded when they are indexed.

`Dataset.images` is an array or a `StreamingImages`, which is indexed like an array. The prefetch pipeline reads batches
from it ahead of the training step.
"""

from __future__ import annotations

import copy
from typing import Any, overload

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.data.bad_samples import BadSamples
from paragan.data.decode import DecodeFailure, check_images_fit_memory, decode_into, parallel_map
from paragan.data.source import DecodeError, Record, Source
from paragan.data.storage.filesystem import SeekableSource


class StreamingImages:
    """Images [N, R, R, C] uint8, indexed like an array; indexing reads and decodes them.

    Args:
        source: the records.
        bad_samples: collects the images that cannot be decoded, and chooses replacements.
        resolution: R, to which images are cropped and resized.
        channels: C, 1 (grey) or 3 (RGB).
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, source: Source, bad_samples: BadSamples, resolution: int, channels: int):
        self.source = source
        self.bad_samples = bad_samples
        self.resolution = resolution
        self.channels = channels
        self.rows: np.ndarray | None = None  # [N] indices in the source; None for all

    def subset(self, rows: np.ndarray) -> StreamingImages:
        """Return the images `rows` [n] (indices) as another StreamingImages."""
        selected = copy.copy(self)
        selected.rows = rows if self.rows is None else self.rows[rows]
        return selected

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, R, R, C)."""
        return len(self), self.resolution, self.resolution, self.channels

    @property
    def nbytes(self) -> int:
        """The memory that all of them would take."""
        return len(self) * self.resolution * self.resolution * self.channels

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read images: [n, R, R, C] for an array of indices, a mask or a slice; [R, R, C] for a number."""
        selected = np.arange(len(self))[index]
        out = np.empty((np.size(selected), *self.shape[1:]), np.uint8)
        flat = np.atleast_1d(selected)
        results = parallel_map(len(flat), lambda i: self.read_into(int(flat[i]), out[i]))
        assert not any(isinstance(result, DecodeFailure) for result in results)
        return out if np.ndim(selected) else out[0]

    @property
    def seekable_source(self) -> SeekableSource | None:
        """The source, if its records are byte ranges of files of this machine; else None."""
        return self.source if self.source.is_local and isinstance(self.source, SeekableSource) else None

    def read_record(self, index: int) -> Record:
        """Read the record of image `index`. On a `DecodeError`, `substitute` provides pixels."""
        return self.source.read(self.source_index(index))

    def read_into(self, index: int, out: np.ndarray) -> None:
        """Read image `index`, or its replacement if it is bad, into `out` [R, R, C]."""
        try:
            decode_into(self.read_record(index), out)
        except DecodeError as error:
            self.substitute(index, str(error), out)

    def substitute(self, index: int, reason: str, out: np.ndarray) -> None:
        """Report image `index` as bad and read another image of its class into `out` [R, R, C].

        Args:
            index: the image that cannot be decoded.
            reason: why.
            out: gets the replacement.

        Raises:
            RunError: too many images are bad, or all of this class.
        """
        bad_index = self.source_index(index)
        self.bad_samples.report(bad_index, reason)
        for other in self.bad_samples.replacements(bad_index):
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
        """Return the index in the source of image `index` (or of images [n])."""
        source_index = index if self.rows is None else self.rows[index]
        return source_index if isinstance(source_index, np.ndarray) else int(source_index)

    def read_all(self) -> np.ndarray:
        """Read all images [N, R, R, C].

        Raises:
            UsageError: they take more than half of the memory (nothing is read then), or too many are bad.
        """
        array = self.source.array
        is_mapped = isinstance(array, np.memmap)  # touching a map whose file was truncated ends the process
        if array is not None and array.shape == self.shape and not is_mapped:
            return np.ascontiguousarray(array)
        check_images_fit_memory(len(self), self.resolution, self.channels)
        out = np.empty(self.shape, np.uint8)
        results = parallel_map(len(out), lambda index: decode_into(self.read_record(index), out[index]))
        failures = [result for result in results if isinstance(result, DecodeFailure)]
        self.bad_samples.reasons.update({self.source_index(failure.index): failure.reason for failure in failures})
        try:
            self.bad_samples.check_limit()
            for failure in failures:
                self.substitute(failure.index, failure.reason, out[failure.index])
        except RunError as error:
            raise UsageError(str(error)) from None
        return out
