"""CIFAR-10 and CIFAR-100 as published: a folder of Python pickles, whose code is never run."""

from __future__ import annotations

from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.array import ArraySource
from paragan.data.formats.class_labels import check_labels, resolve_class_names
from paragan.data.formats.read_span import MAX_RECORD_BYTES
from paragan.data.formats.safe_pickle import UnsafePickleError, safe_unpickle, to_array
from paragan.data.storage.filesystem import DirListing, FileSystem, printable

_ROW_BYTES = 3 * 32 * 32  # of an image: red, green, blue, each 32 x 32
_CIFAR10_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR100_FILE = "train"


def is_cifar(listing: DirListing) -> bool:
    """Return whether a folder holds CIFAR."""
    return any(name in listing.files for name in _CIFAR10_FILES) or {_CIFAR100_FILE, "meta"} <= listing.files.keys()


def open_cifar(fs: FileSystem, listing: DirListing, *, labels: bool = True) -> ArraySource:
    """Read the training images of CIFAR-10, or of CIFAR-100 with its 100 fine labels.

    Raises:
        UsageError: a file is damaged or is not of CIFAR.
    """
    batches = [name for name in _CIFAR10_FILES if name in listing.files]
    if batches:
        key, meta_file, names_key = "labels", "batches.meta", "label_names"
    else:
        batches = [_CIFAR100_FILE]
        key, meta_file, names_key = "fine_labels", "meta", "fine_label_names"
    contents = [_read_batch(fs, name, key if labels else None) for name in batches]
    pixels = np.concatenate([rows for rows, _ in contents])  # [N, 3072]
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    notes = (f"CIFAR's {', '.join(batches)}",)
    if not labels:
        return ArraySource(fs.location, images, notes=notes)
    numbers = np.concatenate([batch_labels for _, batch_labels in contents])
    classes = _read_classes(fs, meta_file, names_key) if meta_file in listing.files else ()
    check_labels(numbers, fs.location, len(classes) or None)
    return ArraySource(fs.location, images, numbers, resolve_class_names(numbers, classes), notes)


def _read_batch(fs: FileSystem, name: str, key: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows [n, 3072] uint8 of one file, and their labels [n] int64 (none without `key`)."""
    path = fs.display_path(name)
    content = _read_dict(fs, name)
    try:
        rows = to_array(content.get("data"))
    except UnsafePickleError as error:
        raise UsageError(f"data: {path}: data cannot be read: {error}; download it again") from None
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != _ROW_BYTES or not len(rows):
        raise UsageError(f"data: {path}: data is {rows.dtype} {list(rows.shape)}, expected uint8 [n, {_ROW_BYTES}]")
    if key is None:
        return rows, np.empty(0, np.int64)
    labels = content.get(key)
    if not isinstance(labels, list):
        raise UsageError(f"data: {path} has no list of {key}; found {', '.join(map(printable, content)) or 'nothing'}")
    if not all(type(label) is int and abs(label) < 2**63 for label in labels) or len(labels) != len(rows):
        raise UsageError(f"data: {path}: {key} are not {len(rows):,} integers, one an image: download it again")
    return rows, np.array(labels, np.int64)


def _read_classes(fs: FileSystem, name: str, key: str) -> tuple[str, ...]:
    values = _read_dict(fs, name).get(key)
    names = [_to_str(value) for value in values] if isinstance(values, list) else []
    if not names or not all(names) or len(set(names)) < len(names):
        raise UsageError(f"data: {fs.display_path(name)}: {key} is not a list of unique names: download it again")
    return tuple(printable(name) for name in names)


def _read_dict(fs: FileSystem, name: str) -> dict[str, Any]:
    path = fs.display_path(name)
    if fs.size(name) > MAX_RECORD_BYTES:
        raise UsageError(
            f"data: {path} is larger than any file of CIFAR ({MAX_RECORD_BYTES:,} bytes): download it again"
        )
    try:
        content = safe_unpickle(fs.read(name))
    except UnsafePickleError as error:
        raise UsageError(f"data: {path} is not a file of CIFAR: {printable(str(error))}; download it again") from None
    if not isinstance(content, dict):
        raise UsageError(f"data: {path} is not a file of CIFAR: it holds no dict; download it again")
    return {_to_str(key): value for key, value in content.items()}


def _to_str(value: Any) -> str:
    """Return a string of Python 3, or of Python 2 (which is unpickled as bytes); "" for other values."""
    if isinstance(value, bytes):
        return value.decode("utf8", "replace")
    return value if isinstance(value, str) else ""
