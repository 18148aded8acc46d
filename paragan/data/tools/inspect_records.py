"""Describe records of several arrays: fields with shapes and types, sample rates, durations, and what is damaged."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.dataset import describe_classes
from paragan.data.decode import DecodeFailure, parallel_map
from paragan.data.formats.record_source import RecordSource
from paragan.data.records.decoder import RecordDecoder, RecordOptions, read_rate
from paragan.data.storage.filesystem import printable

_MAX_LISTED_BAD = 10


def inspect_records(source: RecordSource) -> list[str]:
    """Read all records once and return lines for people.

    Raises:
        UsageError: none can be decoded.
    """
    decoder = RecordDecoder(RecordOptions())

    def measure(index: int) -> tuple[int, dict[str, tuple[str, tuple[int, ...]]]]:
        record = source.read(index)
        fields = decoder.read_fields(record)
        return read_rate(record), {name: (str(x.dtype), x.shape) for name, x in fields.items()}

    results = parallel_map(len(source), measure, 0 if source.is_local else 32)
    bad = [result for result in results if isinstance(result, DecodeFailure)]
    good = [result for result in results if not isinstance(result, DecodeFailure)]
    if not good:
        raise UsageError(f"data: {source.sample_name(0)} cannot be decoded: {bad[0].reason}, nor can any other record")
    rates = Counter(rate for rate, _ in good if rate)
    shapes: dict[str, Counter[tuple[str, tuple[int, ...]]]] = defaultdict(Counter)
    for _, fields in good:
        for name, kind in fields.items():
            shapes[name][kind] += 1
    lines = [f"records   {len(source):,}", f"classes   {describe_classes(source.labels, source.classes)}"]
    for rate, count in sorted(rates.items()):
        seconds = sum(kind[1][-1] for other, fields in good if other == rate for kind in list(fields.values())[:1])
        lines.append(f"audio     {count:,} files of {rate} Hz, {seconds / rate / 60:,.1f} minutes")
    lines += [f"{printable(name):9} {_describe_field(kinds, len(good))}" for name, kinds in sorted(shapes.items())]
    lines += [f"          {note}" for note in source.notes]
    if bad:
        lines.append(f"bad       {len(bad):,} of {len(source):,} cannot be decoded")
        lines += [f"  {source.sample_name(failure.index)}: {failure.reason}" for failure in bad[:_MAX_LISTED_BAD]]
    return lines


def _describe_field(kinds: Counter[tuple[str, tuple[int, ...]]], count: int) -> str:
    """Return the types, the smallest and the largest shape of a field, and how many records lack it."""
    dtypes = " and ".join(sorted({dtype for dtype, _ in kinds}))
    ordered = sorted({shape for _, shape in kinds}, key=lambda shape: (int(np.prod(shape)), shape))
    line = f"{dtypes} {list(ordered[0])}"
    if len(ordered) > 1:
        line += f" to {list(ordered[-1])}"
    missing = count - kinds.total()
    return f"{line}; {missing:,} records have none" if missing else line
