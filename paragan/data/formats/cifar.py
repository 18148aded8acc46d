"""CIFAR-10 and CIFAR-100 as they are handed out: a folder of Python pickles, of which nothing is run."""

from __future__ import annotations

from typing import Any

import numpy as np

from paragan.core.errors import Unusable
from paragan.data.formats.array import Arrays
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import LARGEST
from paragan.data.formats.safe_pickle import Refused, array, unpickled
from paragan.data.storage.filesystem import Entries, Place, shown

_ROW = 3 * 32 * 32  # bytes of an image: red, green, blue, each 32 x 32
_TEN = tuple(f"data_batch_{number}" for number in range(1, 6))
_HUNDRED = "train"


def is_cifar(here: Entries) -> bool:
    """Whether a folder holds CIFAR."""
    return any(name in here.files for name in _TEN) or {_HUNDRED, "meta"} <= here.files.keys()


def cifar(place: Place, here: Entries, *, labels: bool = True) -> Arrays:
    """The training images of CIFAR-10, or of CIFAR-100 with its 100 fine labels."""
    batches = [name for name in _TEN if name in here.files]
    names, key, about, names_key = batches, "labels", "batches.meta", "label_names"
    if not batches:
        names, key, about, names_key = [_HUNDRED], "fine_labels", "meta", "fine_label_names"
    read = [_batch(place, name, key if labels else None) for name in names]
    pixels = np.concatenate([rows for rows, _ in read])  # [N, 3072]
    images = np.ascontiguousarray(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    notes = (f"CIFAR's {', '.join(names)}",)
    if not labels:
        return Arrays(place.where, images, notes=notes)
    numbers = np.concatenate([found for _, found in read])
    classes = _classes(place, about, names_key) if about in here.files else None
    check_labels(numbers, place.where, None if classes is None else len(classes))
    return Arrays(
        place.where, images, numbers, classes or tuple(str(label) for label in range(int(numbers.max()) + 1)), notes
    )


def _batch(place: Place, name: str, key: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Rows [n, 3072] uint8 of one file, and their labels [n] int64."""
    where, found = place.at(name), _dict(place, name)
    try:
        rows = array(found.get("data"))
    except Refused as error:
        raise Unusable(f"data: {where}: data cannot be read: {error}; download it again") from None
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != _ROW or not len(rows):
        raise Unusable(f"data: {where}: data is {rows.dtype} {list(rows.shape)}, wanted uint8 [n, {_ROW}]")
    if key is None:
        return rows, np.empty(0, np.int64)
    labels = found.get(key)
    if not isinstance(labels, list):
        raise Unusable(f"data: {where} has no list of {key}; found {', '.join(map(shown, found)) or 'nothing'}")
    if not all(type(label) is int and abs(label) < 2**63 for label in labels) or len(labels) != len(rows):
        raise Unusable(f"data: {where}: {key} are not {len(rows):,} integers, one an image: download it again")
    return rows, np.array(labels, np.int64)


def _classes(place: Place, name: str, key: str) -> tuple[str, ...]:
    names = _dict(place, name).get(key)
    texts = [_text(one) for one in names] if isinstance(names, list) else []
    if not texts or not all(texts) or len(set(texts)) < len(texts):
        raise Unusable(f"data: {place.at(name)}: {key} is no list of different names: download it again")
    return tuple(shown(text) for text in texts)


def _dict(place: Place, name: str) -> dict[str, Any]:
    where = place.at(name)
    if place.size(name) > LARGEST:
        raise Unusable(f"data: {where} is larger than any file of CIFAR ({LARGEST:,} bytes): download it again")
    try:
        found = unpickled(place.read(name))
    except Refused as error:
        raise Unusable(f"data: {where} is not CIFAR's: {shown(str(error))}; download it again") from None
    if not isinstance(found, dict):
        raise Unusable(f"data: {where} is not CIFAR's: it holds no dict; download it again")
    return {_text(key): value for key, value in found.items()}


def _text(value: Any) -> str:
    """Python 2's texts come as bytes."""
    if isinstance(value, bytes):
        return value.decode("utf8", "replace")
    return value if isinstance(value, str) else ""
