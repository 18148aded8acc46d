"""Records in one `.npz`: an array for each field, [N, ...], and labels and classes as for images."""

from __future__ import annotations

import zipfile

import numpy as np

from paragan.data.formats.class_labels import choose_label_key
from paragan.data.formats.label_arrays import parse_label_array
from paragan.data.formats.npz import (
    MIN_MMAP_BYTES,
    check_array_fits_memory,
    member_data_offset,
    open_archive,
    read_array,
    read_classes,
    read_header,
    read_labels,
)
from paragan.data.formats.record_source import DEFAULT_FIELDS, ArrayRecords, RecordSelection, check_lengths
from paragan.data.source import LabelChoice
from paragan.data.storage.filesystem import FileSystem, printable


def holds_records(fs: FileSystem, name: str, selection: RecordSelection) -> bool:
    """Return whether an npz is read as records: a field was named, or it has one of the usual name.

    Raises:
        UsageError: it is not an npz, or is damaged.
    """
    if selection.field:
        return True
    with open_archive(fs, name) as archive:
        keys = _list_keys(archive)
    others = {"images", "x", "sigma"}  # images, numbers, or moments of images
    return keys.isdisjoint(others) and not keys.isdisjoint(DEFAULT_FIELDS)


def read_npz_records(fs: FileSystem, name: str, *, labels: LabelChoice = True) -> ArrayRecords:
    """Read the arrays of the npz `name` as the fields of records. Large uncompressed ones are memory-mapped.

    Raises:
        UsageError: it is damaged, its arrays have different lengths, or labels do not fit.
    """
    path = fs.display_path(name)
    with open_archive(fs, name) as archive:
        keys = _list_keys(archive)
        label_key = choose_label_key(keys, labels, path)
        names = sorted(keys - {"labels", "classes", label_key})
        headers = {key: read_header(archive, path, key) for key in names}
        check_lengths({key: header.shape for key, header in headers.items()}, path)
        arrays = {key: _read_field(archive, fs, name, key) for key in names}
        numbers: np.ndarray | None = None
        classes: tuple[str, ...] = ()
        if label_key is not None:
            classes = read_classes(archive, path) if "classes" in keys else ()
            count = len(arrays[names[0]])
            numbers, classes = parse_label_array(read_labels(archive, path, label_key, count), label_key, path, classes)
        identity = [f"{info.filename} {info.CRC}".encode() for info in archive.infolist()]
    notes = () if label_key in (None, "labels") else (f"labels of key {printable(label_key)}",)
    return ArrayRecords(path, arrays, numbers, classes, notes, identity)


def _list_keys(archive: zipfile.ZipFile) -> set[str]:
    return {member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")}


def _read_field(archive: zipfile.ZipFile, fs: FileSystem, name: str, key: str) -> np.ndarray:
    """Return an array, memory-mapped if it is large and not compressed."""
    path = fs.display_path(name)
    header = read_header(archive, path, key)
    info = archive.getinfo(f"{key}.npy")
    is_plain = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1 and header.dtype.kind in "fiu"
    if fs.local_root and is_plain and header.nbytes >= MIN_MMAP_BYTES and not header.fortran_order:
        offset = member_data_offset(fs, name, info) + header.data_offset
        if offset + header.nbytes <= fs.size(name):
            return np.memmap(fs.local_root / name, header.dtype, "r", offset, header.shape)
    check_array_fits_memory(header, path, key)
    return read_array(archive, path, key)
