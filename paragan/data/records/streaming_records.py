"""Records of several arrays that are decoded, cut and transformed when they are indexed.

In memory, records are kept as they were decoded, since segments and transforms are drawn anew each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.data.bad_samples import BadSamples
from paragan.data.decode import DecodeFailure, check_fits_memory, parallel_map
from paragan.data.formats.record_source import ArrayRecords, RecordSource
from paragan.data.records.decoder import (
    Fields,
    RecordDecoder,
    RecordOptions,
    is_transform_error,
    load_transform,
    read_rate,
)
from paragan.data.records.layout import RecordLayout, to_float
from paragan.data.source import DecodeError, RowKey, Variation
from paragan.data.storage.filesystem import printable
from paragan.data.streaming import StreamingRows

SAMPLE_RECORDS = 64  # decoded to find out rates, shapes and sizes
SAMPLE_RECORDS_REMOTE = 16


class StreamingRecords(StreamingRows):
    """Records of several arrays, indexed like the array that D judges.

    record_decoder : makes rows

    Args:
        source: the records.
        bad_samples: collects those that cannot be decoded, and chooses replacements.
        options: what is done to them.
        layout: of a decoded record.
    """

    def __init__(self, source: RecordSource, bad_samples: BadSamples, options: RecordOptions, layout: RecordLayout):
        super().__init__(source, bad_samples)
        self.options = options
        self.layout = layout
        self.record_decoder = RecordDecoder(options, layout)
        self.decoder = self.record_decoder

    @property
    def in_memory(self) -> bool:
        """Whether all records are in memory."""
        return isinstance(self.source, RecordSource) and self.source.in_memory

    @property
    def dtype(self) -> np.dtype:
        """uint8 if D judges images, else float32."""
        return np.dtype(np.uint8 if self.layout.main_field.is_image else np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C) if D judges images, else (N, ...)."""
        return len(self), *self.layout.main_field.shape

    @property
    def sample_rate(self) -> int:
        """Sample rate of the array that D judges, Hz, if that is as long as audio of the data set; else 0."""
        shape = self.layout.main_field.shape
        is_wave = len(shape) == 2 and shape[0] == (self.options.channels or 1)
        return self.options.sample_rate if is_wave else 0

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The bytes of all fields."""
        return (self.layout.nbytes,)

    def evaluation_keys(self, index: np.ndarray) -> list[RowKey]:
        """Return keys of random numbers [n] which depend on the record alone, for scores and pictures."""
        return [(0, 0, row, 0) for row in self.source_index(index).tolist()]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Read the judged array of records: [n, ...] for an array of indices, a mask or a slice; [...] for a number."""
        selected = np.arange(len(self))[index]
        flat = np.atleast_1d(selected)
        rows = self.read_rows(flat, self.evaluation_keys(flat))
        values = to_float(self.layout.view(rows, self.layout.main))
        values = np.ascontiguousarray(values, self.dtype)
        return values if np.ndim(selected) else values[0]

    def blank(self) -> StreamingRecords:
        """Return one record of zeros of the same fields."""
        arrays = {field.name: np.zeros((1, *field.shape), field.dtype) for field in self.layout.fields}
        source = ArrayRecords(self.source.location, arrays)
        bad_samples = BadSamples(None, 1, source.sample_name, 0.0, noun="record")
        options = RecordOptions(self.layout.main, sample_rate=self.options.sample_rate, channels=self.options.channels)
        return StreamingRecords(source, bad_samples, options, self.layout)

    def substitute(self, index: int, reason: str, out: np.ndarray, variation: Variation = None) -> None:
        """As for any data; a failure of the user's transform is raised, with the name of the record."""
        if is_transform_error(reason):
            raise RunError(f"{reason}; the record is {self.source.sample_name(self.source_index(index))}")
        super().substitute(index, reason, out, variation)

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names, sizes and checksums (of arrays in memory: all values), fields, and options."""
        layout = f"{self.layout.describe()} {self.layout.nbytes}".encode()
        return itertools.chain(self.source.fingerprint_parts(), [layout], self.options.fingerprint_parts())


class CachedRecords(RecordSource):
    """Decoded records in memory. A bad one is its replacement.

    Args:
        source: where they were read.
        records: [N] the arrays of each.
    """

    in_memory = True

    def __init__(self, source: RecordSource, records: list[Fields]):
        super().__init__(source.location, source.labels, source.classes, source.notes, is_local=True)
        self._source = source
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> Fields:
        """Return the arrays of record `index`."""
        return self._records[index]

    def sample_name(self, index: int) -> str:
        """Return what messages call record `index`."""
        return self._source.sample_name(index)

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield what identifies the data where they were read."""
        return self._source.fingerprint_parts()


def open_records(source: RecordSource, bad_samples: BadSamples, options: RecordOptions) -> StreamingRecords:
    """Prepare to read records: find out their sample rate, fields and shapes from an even sample.

    Args:
        source: the records.
        bad_samples: gets the reasons if none can be decoded.
        options: what is done to them; a sample rate of 0 becomes that of the files.

    Raises:
        UsageError: they have several rates, fields that cannot be trained on, or options do not fit them.
        RunError: the transform fails.
    """
    options.check()
    if options.transform:
        load_transform(options.transform)
    sample = _sample(source)
    options = _resolve_rate(source, sample, options)
    decoder = RecordDecoder(options)
    for index in sample:
        try:
            record = decoder.make_row(source.read(index), (0, 0, index, 0))
        except DecodeError as error:
            if is_transform_error(str(error)):
                raise RunError(f"{error}; the record is {source.sample_name(index)}") from error
            bad_samples.reasons[index] = str(error)
            continue
        bad_samples.reasons.clear()  # they are reported where they are used
        return StreamingRecords(source, bad_samples, options, RecordLayout.of(record, options.field))
    raise UsageError(bad_samples.error_message())


def estimate_bytes(records: StreamingRecords) -> int:
    """Return how much memory all decoded records would take, from an even sample."""
    if isinstance(records.source, ArrayRecords):
        return records.source.nbytes
    sizes: list[int] = []
    for index in _sample(records.source):
        try:
            fields = records.record_decoder.read_fields(records.source.read(index))
            sizes.append(sum(array.nbytes for array in fields.values()))
        except DecodeError:
            continue
    return int(np.mean(sizes or [0]) * len(records))


def read_into_memory(records: StreamingRecords) -> StreamingRecords:
    """Decode all records into memory.

    Raises:
        UsageError: they take more than half of the memory, or too many are bad.
    """
    source = records.source
    assert isinstance(source, RecordSource)
    if source.in_memory:
        return records
    check_fits_memory(estimate_bytes(records), f"{source.location}: {len(source):,} records", "use --data.cache=stream")
    bad_samples = records.bad_samples

    def read(index: int) -> Fields:
        fields = records.record_decoder.read_fields(source.read(index))
        records.record_decoder.cut(fields, (0, 0, index, 0))
        return fields

    results = parallel_map(len(source), read)
    bad_samples.reasons.update({r.index: r.reason for r in results if isinstance(r, DecodeFailure)})
    try:
        bad_samples.check_limit()
        decoded = [_replacement(index, results, bad_samples) for index in range(len(results))]
    except RunError as error:
        raise UsageError(str(error)) from None
    return StreamingRecords(CachedRecords(source, decoded), bad_samples, records.options, records.layout)


def _replacement(index: int, results: list[Fields | DecodeFailure], bad_samples: BadSamples) -> Fields:
    """Return record `index`, or the next good one of its class."""
    for other in itertools.chain([index], bad_samples.replacements(index)):
        result = results[other]
        if not isinstance(result, DecodeFailure):
            return result
    raise RunError(f"{bad_samples.error_message()}; no {bad_samples.noun} of its class is good")


def _sample(source: RecordSource | Any) -> list[int]:
    """Return the indices of records that are decoded to see what they are, evenly spaced."""
    count = SAMPLE_RECORDS if source.is_local else SAMPLE_RECORDS_REMOTE
    return np.unique(np.linspace(0, len(source) - 1, min(len(source), count)).astype(np.int64)).tolist()


def _resolve_rate(source: RecordSource, sample: list[int], options: RecordOptions) -> RecordOptions:
    """Return the options with the sample rate of the files, if they have one.

    Raises:
        UsageError: sampled files have other rates, and resampling was not asked for.
    """
    rates: dict[int, str] = {}
    num_read = 0
    for index in sample:
        try:
            rate = read_rate(source.read(index))
        except DecodeError:
            continue
        num_read += 1
        if rate:
            rates.setdefault(rate, source.sample_name(index))
    if not rates:
        if options.sample_rate and num_read:
            raise UsageError(
                f"data.sample_rate={options.sample_rate}: {printable(source.location)} holds no audio files. Leave it "
                "out"
            )
        return options
    rate = options.sample_rate or next(iter(rates))
    others = [other for other in rates if other != rate]
    if others and not options.resample:
        first = others[0]
        same = f" or --data.sample_rate={first}" if len(rates) == 1 else ""
        raise UsageError(
            f"data.sample_rate={options.sample_rate or 'auto'}: {rates[first]} has {first} Hz, not {rate} Hz. Use "
            f"--data.sample_rate={rate} --data.resample=true{same}"
        )
    return options.with_rate(rate)
