"""Records in one HDF5 file: an array for each field, [N, ...], and labels and classes as for images."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import choose_label_key
from paragan.data.formats.hdf5 import Hdf5Source, list_keys, open_field, open_file, read_classes, read_labels
from paragan.data.formats.label_arrays import parse_label_array
from paragan.data.formats.record_source import DEFAULT_FIELDS, RecordSelection, RecordSource, check_lengths
from paragan.data.source import LabelChoice
from paragan.data.storage.filesystem import FileSystem, printable


class Hdf5Records(RecordSource):
    """Fields of an HDF5 file, each read as the images of one are.

    Args:
        location: what messages call the file.
        fields: one array each, by name.
        labels: [N] int64, or None.
        classes: [K] names.
        notes: lines for `describe`.
    """

    def __init__(
        self,
        location: str,
        fields: Mapping[str, Hdf5Source],
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        first = next(iter(fields.values()))
        super().__init__(location, labels, classes, notes, is_local=first.is_local)
        self.fields = fields
        self._count = len(first)

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> dict[str, np.ndarray]:
        """Return the arrays of record `index`."""
        return {name: np.asarray(source.read(index)) for name, source in self.fields.items()}

    def sample_name(self, index: int) -> str:
        """Return what messages call record `index`."""
        return f"{self.location}, record {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names, shapes, file size and the values of a few records."""
        for name, source in self.fields.items():
            yield name.encode()
            yield from source.fingerprint_parts()


def holds_records(fs: FileSystem, name: str, selection: RecordSelection) -> bool:
    """Return whether a file is read as records: a field was named, or it has one of the usual name and no images."""
    if selection.field:
        return True
    with contextlib.closing(open_file(fs, name)) as file:
        keys = list_keys(file, fs.display_path(name))
    return keys.isdisjoint({"imgs", "images"}) and not keys.isdisjoint(DEFAULT_FIELDS)


def open_hdf5_records(fs: FileSystem, name: str, *, labels: LabelChoice = True) -> Hdf5Records:
    """Open the arrays of the HDF5 file `name` as the fields of records.

    Raises:
        UsageError: it is damaged, its arrays have different lengths, or labels do not fit.
    """
    path = fs.display_path(name)
    file = open_file(fs, name)
    try:
        keys = list_keys(file, path)
        label_key = choose_label_key(keys, labels, path)
        names = sorted(keys - {"labels", "classes", label_key})
        fields = {key: open_field(fs, name, file, key) for key in names}
        check_lengths({key: source.shape for key, source in fields.items()}, path)
        numbers: np.ndarray | None = None
        classes: tuple[str, ...] = ()
        if label_key:
            count = len(fields[names[0]])
            stored = read_labels(fs, name, file, label_key, count)
            numbers, classes = parse_label_array(stored, label_key, path, read_classes(fs, name, file))
        notes = () if label_key in (None, "labels") else (f"labels of key {printable(label_key)}",)
        return Hdf5Records(path, fields, numbers, classes, notes)
    except UsageError:
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            file.close()
        raise
