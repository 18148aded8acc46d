"""CIFAR-10 and CIFAR-100 as they are handed out: a folder of Python pickles, of which nothing is run."""

from __future__ import annotations

from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.array import ArraySource
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import MAX_RECORD_BYTES
from paragan.data.formats.safe_pickle import UnsafePickleError, safe_unpickle, to_array
from paragan.data.storage.filesystem import DirListing, FileSystem, printable

_ROW_BYTES = 3 * 32 * 32  # bytes of an image: red, green, blue, each 32 x 32
_CIFAR10_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR100_FILE = "train"


def is_cifar(listing: DirListing) -> bool:
    """Whether a folder holds CIFAR."""
    return any(name in listing.files for name in _CIFAR10_FILES) or {_CIFAR100_FILE, "meta"} <= listing.files.keys()


def open_cifar(fs: FileSystem, listing: DirListing, *, labels: bool = True) -> ArraySource:
    """The training images of CIFAR-10, or of CIFAR-100 with its 100 fine labels."""
    batches = [name for name in _CIFAR10_FILES if name in listing.files]
    names, key, about, names_key = batches, "labels", "batches.meta", "label_names"
    if not batches:
        names, key, about, names_key = [_CIFAR100_FILE], "fine_labels", "meta", "fine_label_names"
    read = [_read_batch(fs, name, key if labels else None) for name in names]
    pixels = np.concatenate([rows for rows, _ in read])  # [N, 3072]
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    notes = (f"CIFAR's {', '.join(names)}",)
    if not labels:
        return ArraySource(fs.location, images, notes=notes)
    numbers = np.concatenate([found for _, found in read])
    classes = _read_classes(fs, about, names_key) if about in listing.files else None
    check_labels(numbers, fs.location, None if classes is None else len(classes))
    return ArraySource(
        fs.location, images, numbers, classes or tuple(str(label) for label in range(int(numbers.max()) + 1)), notes
    )


def _read_batch(fs: FileSystem, name: str, key: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, 3072] uint8 of one file, and their labels [n] int64."""
    where, found = fs.display_path(name), _read_dict(fs, name)
    try:
        rows = to_array(found.get("data"))
    except UnsafePickleError as error:
        raise UsageError(f"data: {where}: data cannot be read: {error}; download it again") from None
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != _ROW_BYTES or not len(rows):
        raise UsageError(f"data: {where}: data is {rows.dtype} {list(rows.shape)}, wanted uint8 [n, {_ROW_BYTES}]")
    if key is None:
        return rows, np.empty(0, np.int64)
    labels = found.get(key)
    if not isinstance(labels, list):
        raise UsageError(f"data: {where} has no list of {key}; found {', '.join(map(printable, found)) or 'nothing'}")
    if not all(type(label) is int and abs(label) < 2**63 for label in labels) or len(labels) != len(rows):
        raise UsageError(f"data: {where}: {key} are not {len(rows):,} integers, one an image: download it again")
    return rows, np.array(labels, np.int64)


def _read_classes(fs: FileSystem, name: str, key: str) -> tuple[str, ...]:
    names = _read_dict(fs, name).get(key)
    texts = [_to_str(one) for one in names] if isinstance(names, list) else []
    if not texts or not all(texts) or len(set(texts)) < len(texts):
        raise UsageError(f"data: {fs.display_path(name)}: {key} is no list of different names: download it again")
    return tuple(printable(text) for text in texts)


def _read_dict(fs: FileSystem, name: str) -> dict[str, Any]:
    where = fs.display_path(name)
    if fs.size(name) > MAX_RECORD_BYTES:
        raise UsageError(
            f"data: {where} is larger than any file of CIFAR ({MAX_RECORD_BYTES:,} bytes): download it again"
        )
    try:
        found = safe_unpickle(fs.read(name))
    except UnsafePickleError as error:
        raise UsageError(f"data: {where} is not CIFAR's: {printable(str(error))}; download it again") from None
    if not isinstance(found, dict):
        raise UsageError(f"data: {where} is not CIFAR's: it holds no dict; download it again")
    return {_to_str(key): value for key, value in found.items()}


def _to_str(value: Any) -> str:
    """Python 2's texts come as bytes."""
    if isinstance(value, bytes):
        return value.decode("utf8", "replace")
    return value if isinstance(value, str) else ""
