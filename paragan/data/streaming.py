"""Records that are read and decoded when they are indexed.

`Dataset.images` is an array, a `StreamingImages` or a `StreamingRecords` (`records`), which are indexed like an array.
The prefetch pipeline reads batches from them ahead of the training step.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Self, overload

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.core.image_shape import ImageSize
from paragan.data.bad_samples import BadSamples
from paragan.data.decode import DecodeFailure, ImageDecoder, check_images_fit_memory, measure_record, parallel_map
from paragan.data.source import DecodeError, Record, RowDecoder, Source, Variation
from paragan.data.storage.filesystem import SeekableSource
from paragan.data.value_range import ImageValues, ValueRange, outside_range_message


class StreamingRows(ABC):
    """Records of a source, each decoded to a row of bytes.

    decoder : makes a row of a record
    rows    : [N] indices in the source; None for all

    Args:
        source: the records.
        bad_samples: collects those that cannot be decoded, and chooses replacements.
    """

    decoder: RowDecoder

    def __init__(self, source: Source, bad_samples: BadSamples):
        self.source = source
        self.bad_samples = bad_samples
        self.rows: np.ndarray | None = None

    @property
    @abstractmethod
    def dtype(self) -> np.dtype:
        """Type of what indexing returns: uint8 for images, float32 for numbers."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of what indexing returns, (N, H, W, C) or (N, ...)."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a decoded row, uint8."""

    @abstractmethod
    def __getitem__(self, index: Any) -> np.ndarray:
        """Read rows: [n, ...] for an array of indices, a mask or a slice; [...] for a number."""

    @abstractmethod
    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield what identifies the data and what is done to them, without decoding anything."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a decoded row."""
        return int(np.prod(self.row_shape))

    def subset(self, rows: np.ndarray) -> Self:
        """Return the records `rows` [n] (indices) as another object of this class."""
        selected = copy.copy(self)
        selected.rows = rows if self.rows is None else self.rows[rows]
        return selected

    def __len__(self) -> int:
        return len(self.source) if self.rows is None else len(self.rows)

    @property
    def seekable_source(self) -> SeekableSource | None:
        """The source, if its records are byte ranges of files of this machine; else None."""
        return self.source if self.source.is_local and isinstance(self.source, SeekableSource) else None

    def read_record(self, index: int) -> Any:
        """Read record `index`. On a `DecodeError`, `substitute` provides a row."""
        return self.source.read(self.source_index(index))

    def read_into(self, index: int, out: np.ndarray, variation: Variation = None) -> None:
        """Read record `index`, or its replacement if it is bad, into `out`, a row."""
        try:
            self.decoder.decode(self.read_record(index), out, variation)
        except DecodeError as error:
            self.substitute(index, str(error), out, variation)

    def read_rows(self, index: np.ndarray, variations: Sequence[Variation]) -> np.ndarray:
        """Read records `index` [n], on all cores: [n, *row_shape] uint8.

        Raises:
            RunError: one cannot be read, or too many are bad.
        """
        out = np.empty((len(index), *self.row_shape), np.uint8)
        results = parallel_map(len(index), lambda i: self.read_into(int(index[i]), out[i], variations[i]))
        assert not any(isinstance(result, DecodeFailure) for result in results)
        return out

    def substitute(self, index: int, reason: str, out: np.ndarray, variation: Variation = None) -> None:
        """Report record `index` as bad and read another one of its class into `out`, a row.

        Args:
            index: the record that cannot be decoded.
            reason: why.
            out: gets the replacement.
            variation: how it is varied.

        Raises:
            RunError: too many records are bad, or all of this class.
        """
        bad_index = self.source_index(index)
        self.bad_samples.report(bad_index, reason)
        for other in self.bad_samples.replacements(bad_index):
            try:
                return self.decoder.decode(self.source.read(other), out, variation)
            except DecodeError as error:
                self.bad_samples.report(other, str(error))
        raise RunError(f"{self.bad_samples.error_message()}; no {self.bad_samples.noun} of its class is good")

    @overload
    def source_index(self, index: int) -> int: ...
    @overload
    def source_index(self, index: np.ndarray) -> np.ndarray: ...
    def source_index(self, index: int | np.ndarray) -> int | np.ndarray:
        """Return the index in the source of record `index` (or of records [n])."""
        source_index = index if self.rows is None else self.rows[index]
        return source_index if isinstance(source_index, np.ndarray) else int(source_index)


class StreamingImages(StreamingRows):
    """Images [N, H, W, C] uint8, indexed like an array; indexing reads and decodes them.

    Args:
        source: the records.
        bad_samples: collects the images that cannot be decoded, and chooses replacements.
        size: width and height, to which images are cropped and resized.
        channels: C, 1 (grey), 3 (RGB), or all channels of the records.
        value_range: the values that become 0 and 255; None for 8-bit images.
    """

    def __init__(
        self,
        source: Source,
        bad_samples: BadSamples,
        size: ImageSize,
        channels: int,
        value_range: ValueRange | None = None,
    ):
        super().__init__(source, bad_samples)
        self.size = size
        self.channels = channels
        self.value_range = value_range
        self.decoder = ImageDecoder(value_range)

    @property
    def dtype(self) -> np.dtype:
        """uint8."""
        return np.dtype(np.uint8)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, H, W, C)."""
        return len(self), *self.row_shape

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """(H, W, C)."""
        return self.size.height, self.size.width, self.channels

    @property
    def nbytes(self) -> int:
        """The memory that all of them would take."""
        return len(self) * self.row_bytes

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read images: [n, H, W, C] for an array of indices, a mask or a slice; [H, W, C] for a number."""
        selected = np.arange(len(self))[index]
        flat = np.atleast_1d(selected)
        out = self.read_rows(flat, [False] * len(flat))
        return out if np.ndim(selected) else out[0]

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names, sizes, checksums and range, which decodes nothing."""
        parts = self.source.fingerprint_parts()
        return parts if self.value_range is None else itertools.chain(parts, [self.value_range.option.encode()])

    def decode(self, record: Record, out: np.ndarray) -> None:
        """Decode a record of the source into `out` [R, R, C]. Raises `DecodeError`."""
        self.decoder.decode(record, out)

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
