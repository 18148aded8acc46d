"""Data sets whose records are several named arrays: arrays with a common first axis, or files of each record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import check_labels, resolve_class_names
from paragan.data.storage.filesystem import printable

DEFAULT_FIELDS = ("image", "wave")  # fields that D judges where none is named
_FINGERPRINT_RECORDS = 16  # of memory-mapped arrays


@dataclass(frozen=True)
class RecordSelection:
    """Select the field of a record that D judges, and the source of its label.

    field         : the field that D judges; a name makes records of data that would be images otherwise
    label_pattern : a regular expression whose group is the class in the path of a file; "" for class folders
    """

    field: str = ""
    label_pattern: str = ""


class RecordSource(ABC):
    """A `Source` of records of several arrays.

    in_memory : whether records are arrays in memory

    Args:
        location: what messages call it.
        labels: [N] int64 in 0..K-1, or None.
        classes: [K] names.
        notes: lines for `describe`.
        is_local: whether records are read at the speed of memory or disk.
    """

    array = None
    in_memory = False

    def __init__(
        self,
        location: str,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...] = (),
        *,
        is_local: bool,
    ):
        self.location = location
        self.labels = labels
        self.classes = classes
        self.notes = notes
        self.is_local = is_local

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, index: int) -> Any:
        """Return a file that holds the arrays of record `index`, or a file or an array for each field."""

    @abstractmethod
    def sample_name(self, index: int) -> str:
        """Return what messages call record `index`."""

    @abstractmethod
    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield what identifies the data."""


class ArrayRecords(RecordSource):
    """Arrays with a common first axis, in memory or memory-mapped.

    Args:
        location: what messages call them.
        arrays: [N, ...] by the name of the field.
        labels: [N] int64 in 0..K-1, or None.
        classes: [K] names.
        notes: lines for `describe`.
        identity: of memory-mapped files: sizes and dates.

    Raises:
        UsageError: they have different first axes, or none.
    """

    def __init__(
        self,
        location: str,
        arrays: Mapping[str, np.ndarray],
        labels: np.ndarray | None = None,
        classes: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
        identity: Sequence[bytes] = (),
    ):
        super().__init__(location, labels, classes, notes, is_local=True)
        self.arrays = dict(arrays)
        self.identity = identity
        self.in_memory = not any(isinstance(array, np.memmap) for array in arrays.values())
        check_lengths({name: array.shape for name, array in arrays.items()}, location)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, index: int) -> dict[str, np.ndarray]:
        """Return the arrays of record `index`."""
        return {name: np.asarray(array[index]) for name, array in self.arrays.items()}

    def sample_name(self, index: int) -> str:
        """Return what messages call record `index`."""
        return f"{self.location}, record {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names, types and shapes, and all values; of memory-mapped arrays those of a few records."""
        for name, array in sorted(self.arrays.items()):
            yield f"{name} {array.dtype} {array.shape}".encode()
            if not isinstance(array, np.memmap):
                yield np.ascontiguousarray(array).tobytes()
                continue
            for index in np.unique(np.linspace(0, len(array) - 1, _FINGERPRINT_RECORDS).astype(int)):
                yield array[index].tobytes()
        yield from self.identity


def check_lengths(shapes: Mapping[str, tuple[int, ...]], location: str) -> None:
    """Check that arrays have a common first axis: one entry for each record.

    Raises:
        UsageError: they have not, or hold nothing.
    """
    if not shapes:
        raise UsageError(f"data: {location} holds no arrays. Give at least one, [N, ...]")
    lengths = {name: shape[0] if shape else 0 for name, shape in shapes.items()}
    first, count = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != count:
            raise UsageError(
                f"data: {location}: {printable(first)} is {list(shapes[first])} and {printable(name)} is "
                f"{list(shapes[name])}: the first axis counts records. Give all fields the same"
            )
    if not count:
        raise UsageError(f"data: {location}: {printable(first)} is {list(shapes[first])}, no record. Give at least one")


def records_from_arrays(
    arrays: Mapping[str, np.ndarray], labels: np.ndarray | None, classes: tuple[str, ...]
) -> ArrayRecords:
    """Return the source of arrays from Python, whose labels are checked.

    Raises:
        UsageError: lengths or labels do not fit.
    """
    records = ArrayRecords("the arrays", {name: np.asarray(array) for name, array in arrays.items()})
    if labels is None:
        return records
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iu" or labels.shape != (len(records),):
        raise UsageError(f"data: labels are {labels.dtype} {list(labels.shape)}, expected integers [{len(records)}]")
    check_labels(labels, "the arrays", len(classes) or None)
    records.labels = labels.astype(np.int64)
    records.classes = resolve_class_names(labels, classes)
    return records
