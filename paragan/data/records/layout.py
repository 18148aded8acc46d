"""Memory layout of a record: its named arrays, packed into one row of bytes.

A batch of records is one array [N, row bytes] uint8, so that memory limits, shared memory and copies to the device are
those of images, whose row is their pixels. Types are kept: float16 takes two bytes on its way to the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.wav_files import INT16_SCALE
from paragan.data.formats.record_source import DEFAULT_FIELDS
from paragan.data.storage.filesystem import printable

ALIGNMENT_BYTES = 16  # of a field in its row: more than any type needs
FIELD_DTYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int16), np.dtype(np.uint8))


@dataclass(frozen=True)
class RecordField:
    """Name, shape and type of one array of a record.

    shape : of the array
    dtype : one of FIELD_DTYPES
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def is_image(self) -> bool:
        """Whether it is an image [H, W, C]."""
        return self.dtype == np.uint8

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Shape as networks see it: [C, H, W] of images."""
        return (self.shape[2], *self.shape[:2]) if self.is_image else self.shape

    def __str__(self) -> str:
        return f"{printable(self.name)} {list(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class RecordLayout:
    """The fields of a record, in the order of their names.

    main   : name of the array that D judges
    """

    fields: tuple[RecordField, ...]
    main: str

    @classmethod
    def of(cls, record: Mapping[str, np.ndarray], field: str = "") -> RecordLayout:
        """Return the layout of records like this one.

        Args:
            record: the arrays.
            field: the name of the one that D judges; "" for the usual one.

        Raises:
            UsageError: a field is of another type, or none is the judged one.
        """
        name = choose_main_field(record, field)
        fields = tuple(RecordField(key, record[key].shape, record[key].dtype) for key in sorted(record))
        for entry in fields:
            check_field(entry)
        return cls(fields, name)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """First byte of each field in a row."""
        offsets: list[int] = []
        end = 0
        for field in self.fields:
            offsets.append(end)
            end += _aligned(field.nbytes)
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return sum(_aligned(field.nbytes) for field in self.fields)

    @property
    def main_field(self) -> RecordField:
        """The array that D judges."""
        return next(field for field in self.fields if field.name == self.main)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each field as networks see it."""
        return {field.name: field.model_shape for field in self.fields}

    def view(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Return one field [N, ...] of rows [N, nbytes] uint8."""
        for field, offset in zip(self.fields, self.offsets):
            if field.name == name:
                data = rows[:, offset : offset + field.nbytes].view(field.dtype)
                return data.reshape(len(rows), *field.shape)
        raise KeyError(name)

    def write(self, record: Mapping[str, np.ndarray], out: np.ndarray) -> None:
        """Copy a record that fits into `out` [nbytes] uint8."""
        for field, offset in zip(self.fields, self.offsets):
            out[offset : offset + field.nbytes].view(field.dtype).reshape(field.shape)[...] = record[field.name]

    def widen(self, record: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a record with int16 as float32 where the layout has float32: 16-bit audio among other files."""
        floats = {field.name for field in self.fields if field.dtype == np.float32}
        return {name: to_float(array) if name in floats else array for name, array in record.items()}

    def find_mismatch(self, record: Mapping[str, np.ndarray]) -> str:
        """Return how a record differs from the first one, of which the layout is; "" if it fits."""
        names = {field.name for field in self.fields}
        if names != record.keys():
            return f"it has {_names(record)}, and the first record has {_names(names)}"
        for field in self.fields:
            array = record[field.name]
            if array.shape != field.shape or array.dtype != field.dtype:
                found = RecordField(field.name, array.shape, array.dtype)
                return f"it has {found}, and the first record has {list(field.shape)} {field.dtype}"
        return ""

    def describe(self) -> str:
        """Return a few words for people: the fields with shapes and types."""
        return ", ".join(f"{field} (judged)" if field.name == self.main else str(field) for field in self.fields)


def choose_main_field(names: Mapping[str, object], field: str) -> str:
    """Return the name of the field that D judges: `field`, else `image`, `wave` or the only one.

    Raises:
        UsageError: there is no such field, or several may be meant.
    """
    if field:
        if field not in names:
            raise UsageError(
                f"data.field={printable(field)}: the records have no such field. Use one of {_names(names)}"
            )
        return field
    usual = [name for name in DEFAULT_FIELDS if name in names]
    if len(usual) == 1 or len(names) == 1:
        return (usual or list(names))[0]
    example = next(iter(names))
    raise UsageError(
        f"data: the records have several fields: {_names(names)}. Name the one that D judges: --data.field={example}, "
        f"in Python field={example!r}"
    )


def check_field(field: RecordField) -> None:
    """Raise UsageError if a field is of a type that networks do not get."""
    name = printable(field.name)
    if field.dtype not in FIELD_DTYPES or (field.is_image and len(field.shape) != 3):
        raise UsageError(
            f"data: field {field} cannot be trained on. Use float32, float16 or int16, uint8 for images [H, W, C], or "
            f"convert {name} with --data.transform"
        )
    if 0 in field.shape:
        raise UsageError(f"data: field {field} holds nothing. Leave {name} out of the files, or fill it")


def to_float(samples: np.ndarray) -> np.ndarray:
    """Return int16 samples as float32 in [-1, 1); others unchanged."""
    if samples.dtype != np.int16:
        return samples
    return samples.astype(np.float32) / np.float32(INT16_SCALE)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _names(names: Mapping[str, object] | set[str]) -> str:
    return ", ".join(map(printable, sorted(names))) or "nothing"
