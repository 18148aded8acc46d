"""Images that are read and decoded when they are indexed.

`Dataset.images` is an array or a `StreamingImages`, which is indexed like an array. The prefetch pipeline reads batches
from it ahead of the training step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, overload

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.core.image_shape import ImageSize
from paragan.data.bad_samples import BadSamples
from paragan.data.decode import DecodeFailure, check_images_fit_memory, decode_into, measure_record, parallel_map
from paragan.data.source import DecodeError, Record, Source
from paragan.data.storage.filesystem import SeekableSource
from paragan.data.value_range import ImageValues, ValueRange, outside_range_message


class StreamingImages:
    """Images [N, H, W, C] uint8, indexed like an array; indexing reads and decodes them.

    Args:
        source: the records.
        bad_samples: collects the images that cannot be decoded, and chooses replacements.
        size: width and height, to which images are cropped and resized.
        channels: C, 1 (grey), 3 (RGB), or all channels of the records.
        value_range: the values that become 0 and 255; None for 8-bit images.
    """

    dtype = np.dtype(np.uint8)

    def __init__(
        self,
        source: Source,
        bad_samples: BadSamples,
        size: ImageSize,
        channels: int,
        value_range: ValueRange | None = None,
    ):
        self.source = source
        self.bad_samples = bad_samples
        self.size = size
        self.channels = channels
        self.value_range = value_range
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
        """(N, H, W, C)."""
        return len(self), self.size.height, self.size.width, self.channels

    @property
    def nbytes(self) -> int:
        """The memory that all of them would take."""
        return len(self) * self.size.pixels * self.channels

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read images: [n, H, W, C] for an array of indices, a mask or a slice; [H, W, C] for a number."""
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
        """Read image `index`, or its replacement if it is bad, into `out` [H, W, C]."""
        try:
            self.decode(self.read_record(index), out)
        except DecodeError as error:
            self.substitute(index, str(error), out)

    def decode(self, record: Record, out: np.ndarray) -> None:
        """Decode a record of the source into `out` [R, R, C]. Raises `DecodeError`."""
        decode_into(record, out, self.value_range)

    def substitute(self, index: int, reason: str, out: np.ndarray) -> None:
        """Report image `index` as bad and read another image of its class into `out` [H, W, C].

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
                return self.decode(self.source.read(other), out)
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
        """Read all images [N, H, W, C].

        Raises:
            UsageError: they take more than half of the memory (nothing is read then), too many are bad, or some hold
                values outside of the range that was found.
        """
        array = self.source.array
        is_mapped = isinstance(array, np.memmap)  # touching a map whose file was truncated ends the process
        is_changed = self.value_range is not None and self.value_range.changes_8_bit
        if array is not None and array.shape == self.shape and not is_mapped and not is_changed:
            return np.ascontiguousarray(array)
        check_images_fit_memory(len(self), self.size, self.channels)
        out = np.empty(self.shape, np.uint8)
        results = parallel_map(len(out), lambda index: self.decode(self.read_record(index), out[index]))
        failures = [result for result in results if isinstance(result, DecodeFailure)]
        self._check_range(failures)
        self.bad_samples.reasons.update({self.source_index(failure.index): failure.reason for failure in failures})
        try:
            self.bad_samples.check_limit()
            for failure in failures:
                self.substitute(failure.index, failure.reason, out[failure.index])
        except RunError as error:
            raise UsageError(str(error)) from None
        return out

    def _check_range(self, failures: Sequence[DecodeFailure]) -> None:
        """Raise UsageError if images failed because `auto` found a range without looking at them."""
        if not failures or (self.value_range is not None and self.value_range.clips):
            return

        def measure(number: int) -> ImageValues:
            return measure_record(self.read_record(failures[number].index))

        results = parallel_map(len(failures), measure)
        rejected = [image for image in results if isinstance(image, ImageValues) and not image.is_plain]
        if rejected:
            first = self.source.sample_name(self.source_index(failures[results.index(rejected[0])].index))
            raise UsageError(outside_range_message(self.value_range, rejected, len(self), first))
