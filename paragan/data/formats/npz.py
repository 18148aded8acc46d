"""A labelled set in one `.npz`, checked array by array before it is read. Nothing in it is ever unpickled."""

from __future__ import annotations

import difflib
import io
import math
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from paragan.core.errors import Unusable
from paragan.data.decode import ram_bytes
from paragan.data.formats.array import Arrays, values
from paragan.data.formats.read_span import Steady, fetch
from paragan.data.storage.filesystem import Place, one_line, shown
from paragan.data.storage.local import Here

WANTED = (
    "images (uint8 [N, H, W, C] or [N, H, W]) or x (float [N, ...]), labels (integers [N], optional), "
    "classes (names [K], optional)"
)

MAPPED = 2**28  # bytes of images from which on they are mapped into memory rather than read, if they are not compressed

_DAMAGE = (
    # of the archive
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error, LookupError),
    # of an array's header, which is a Python literal
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError, OverflowError),
)


@dataclass(frozen=True)
class _Head:
    """What an array in the archive is, before its data is read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    start: int  # bytes before its data

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class Mapped(Arrays):
    """Images mapped from a file. Single ones are read from it: touching a map whose file was cut ends the process."""

    def __init__(self, steady: Steady, place: Place, name: str, images: np.ndarray, *more: Any, **others: Any):
        super().__init__(place.at(name), images, *more, **others)
        self.steady, self.place, self.file, self.start = steady, place, name, images.offset  # pyright: ignore[reportAttributeAccessIssue]

    def read(self, index: int) -> np.ndarray:
        shape = self.whole.shape[1:]
        size = math.prod(shape)
        with self.steady.read():
            data = fetch(self.place, self.file, self.start + index * size, size)
        return np.frombuffer(data, np.uint8).reshape(shape)


def read_npz(place: Place, name: str, *, labels: bool = True) -> Arrays:
    """Read the set in the file `name`, images or numbers `x`; without `labels` theirs are not even looked at.

    Large images that are not compressed are mapped rather than read: then nobody checks their checksum.

    Raises `Unusable` for what is not an npz, is damaged, or holds keys, types, shapes or labels that do not
    fit; `OSError` if the file cannot be read.
    """
    where, steady = place.at(name), Steady(place, name)
    with _open(place, name) as archive:
        keys = _keys(archive, where)
        images, mark = _images(archive, where, place, name) if "images" in keys else (_values(archive, where), b"")
        if labels and "classes" in keys and "labels" not in keys:
            raise Unusable(f"data: {where} has classes but no labels: add labels, integers [{len(images)}]")
        mapped = isinstance(images, np.memmap)
        made = partial(Mapped, steady, place, name) if mapped else partial(Arrays, where)
        others = _others(keys)
        notes = (f"ignored keys: {_some(others)}",) * bool(others)
        if not labels or "labels" not in keys:
            return made(images, notes=notes, mark=mark)
        names = _classes(archive, where) if "classes" in keys else None
        numbers = _labels(archive, where, len(images))
        check_labels(numbers, where, None if names is None else len(names))
        classes = names or tuple(str(label) for label in range(int(numbers.max()) + 1))
        return made(images, numbers.astype(np.int64), classes, notes, mark)


def read_npy(place: Place, name: str) -> Arrays:
    """Numbers [N, ...] in one array, without labels."""
    where = place.at(name)
    if place.size(name) > ram_bytes() // 2:
        raise Unusable(f"data: {where} is larger than half of this machine's memory: store less")
    try:
        x = np.lib.format.read_array(io.BytesIO(place.read(name)), allow_pickle=False)
    except _DAMAGE as error:
        raise Unusable(f"data: {where} is no array, or a damaged one ({one_line(error)}): np.save(path, x)") from None
    return Arrays(where, values(x, where))


def check_labels(labels: np.ndarray, name: str, classes: int | None) -> None:
    """Raise `Unusable` unless `labels` [N] lie in 0..classes-1; if None, in 0..max with an image for each."""
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0:
        count = int((labels < 0).sum())
        raise Unusable(f"data: {name}: {count:,} of {len(labels):,} labels are negative ({lowest}): count from 0")
    if classes is not None:
        if highest >= classes:
            raise Unusable(f"data: {name}: label {highest} but {classes} classes: labels must lie in 0..{classes - 1}")
        return
    seen = np.unique(labels)
    if missing := highest + 1 - len(seen):
        candidates = np.arange(min(highest + 1, len(seen) + 5))  # holds the first five, however large the labels
        first = ", ".join(str(label) for label in np.setdiff1d(candidates, seen)[:5])
        raise Unusable(
            f"data: {name}: labels go up to {highest}, but {missing:,} of these classes have no image "
            f"({first}{', ...' if missing > 5 else ''}): "
            f"renumber with np.unique(labels, return_inverse=True)[1]"
        )


def _keys(archive: zipfile.ZipFile, name: str) -> list[str]:
    keys = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
    if "images" not in keys and "x" in keys:
        return keys
    if "images" not in keys and {"mu", "sigma"} <= {*keys}:
        raise Unusable(f"data: {name} holds moments of images (mu, sigma; see `paragan data stats`): give the images")
    if "images" not in keys:
        raise Unusable(f"data: {name} has no images; found {_some(keys)}; wanted {WANTED}")
    for wanted in ("labels", "classes"):
        near = difflib.get_close_matches(wanted, _others(keys), n=1)
        if near and wanted not in keys:
            raise Unusable(f"data: {name} has {shown(near[0])}, which should be called {wanted}; wanted {WANTED}")
    return keys


def _others(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in ("images", "x", "labels", "classes"))


def _some(keys: Sequence[str]) -> str:
    return ", ".join(shown(key)[:80] for key in keys[:10]) + ", ..." * (len(keys) > 10) or "nothing"


def _images(archive: zipfile.ZipFile, where: str, place: Place, name: str) -> tuple[np.ndarray, bytes]:
    """[N, H, W, C] uint8, and what tells them from others if that is known without reading them."""
    head = _head(archive, where, "images")
    shape, dtype = head.shape, head.dtype
    if dtype != np.uint8:
        raise Unusable(f"data: {where}: images are {dtype}, wanted uint8 in 0..255: {_conversion(dtype)}")
    if len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        raise Unusable(
            f"data: {where}: images are {list(shape)}, wanted [N, H, W, C]: "
            f"images.transpose(0, 2, 3, 1) moves the channels"
        )
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise Unusable(f"data: {where}: images are {list(shape)}, wanted [N, H, W, C] with C 1 or 3, or [N, H, W]")
    if 0 in shape:
        raise Unusable(f"data: {where}: images are {list(shape)}, no image: give at least one")
    info = archive.getinfo("images.npy")
    stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    if isinstance(place, Here) and not place.remote and stored and head.nbytes >= MAPPED and not head.fortran:
        at = _data_of(place, name, info) + head.start
        if at + head.nbytes <= min(place.size(name), at - head.start + info.file_size):
            mapped = np.memmap(place.path / name, np.uint8, "r", at, shape)
            return mapped.reshape(*shape[:3], -1), f"images {shape} {info.CRC}".encode()
    _refuse_beyond_memory(head, where, "images")
    return np.ascontiguousarray(_array(archive, where, "images")).reshape(*shape[:3], -1), b""


def _values(archive: zipfile.ZipFile, where: str) -> np.ndarray:
    _refuse_beyond_memory(_head(archive, where, "x"), where, "x")
    return values(_array(archive, where, "x"), where)


def _data_of(place: Place, name: str, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member start: behind its local header, which has two lengths at 26."""
    lengths = struct.unpack("<HH", place.read(name, info.header_offset + 26, 4))
    return info.header_offset + 30 + sum(lengths)


def _labels(archive: zipfile.ZipFile, name: str, count: int) -> np.ndarray:  # [N], integers of any type
    head = _head(archive, name, "labels")
    shape, dtype = head.shape, head.dtype
    if dtype.kind not in "iu":
        raise Unusable(f"data: {name}: labels are {dtype}, wanted integers: labels.astype(np.int64)")
    if len(shape) != 1:
        remedy = "labels.argmax(1)" if len(shape) == 2 and shape[1] > 1 else "labels.reshape(-1)"
        raise Unusable(f"data: {name}: labels are {list(shape)}, wanted [{count}], one an image: {remedy}")
    if shape[0] != count:
        raise Unusable(f"data: {name}: {shape[0]:,} labels for {count:,} images: give one label an image")
    _refuse_beyond_memory(head, name, "labels")
    return _array(archive, name, "labels")


def _classes(archive: zipfile.ZipFile, name: str) -> tuple[str, ...]:
    head = _head(archive, name, "classes")
    shape, dtype = head.shape, head.dtype
    if dtype.kind != "U" or len(shape) != 1 or not shape[0]:
        raise Unusable(
            f"data: {name}: classes are {dtype} {list(shape)}, wanted one name a class: np.array(names, dtype=str)"
        )
    _refuse_beyond_memory(head, name, "classes")
    names = tuple(str(one) for one in _array(archive, name, "classes"))
    twice, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise Unusable(
            f"data: {name}: {count} classes are called {shown(repr(twice)[:80])}: every class needs its own name"
        )
    return names


def _conversion(dtype: np.dtype) -> str:
    if dtype.kind == "O":
        return "these are pickled objects, which are never loaded; np.stack(images) of equal uint8 arrays"
    if dtype.kind == "f":
        return "(images * 255).round().astype(np.uint8) from [0, 1]; from [-1, 1] the same of (images + 1) / 2"
    if dtype.kind == "b":
        return "images.astype(np.uint8) * 255"
    return "images.astype(np.uint8) if they are in 0..255"


def _head(archive: zipfile.ZipFile, name: str, key: str) -> _Head:
    with _reading(name), archive.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = parse(file)
        if any(side < 0 for side in shape):
            raise ValueError(f"{key} are {list(shape)}")
        return _Head(shape, dtype, fortran, file.tell())


def _refuse_beyond_memory(head: _Head, name: str, key: str) -> None:
    need, limit = head.nbytes, ram_bytes() // 2
    if need > limit:
        raise Unusable(
            f"data: {name}: {key} {list(head.shape)} need {need / 2**30:,.1f} GiB, more than half of "
            f"this machine's {2 * limit / 2**30:,.1f} GiB of memory: store smaller or fewer images"
        )


def _array(archive: zipfile.ZipFile, name: str, key: str) -> np.ndarray:
    with _reading(name), archive.open(f"{key}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


@contextmanager
def _open(place: Place, name: str) -> Iterator[zipfile.ZipFile]:
    where = place.at(name)
    if place.remote and place.size(name) > ram_bytes() // 2:
        raise Unusable(f"data: {where} is larger than half of this machine's memory: copy it to this machine")
    with io.BytesIO(place.read(name)) if place.remote else place.open(name) as file:
        with _reading(where):
            archive = zipfile.ZipFile(file)
        with archive:
            yield archive


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Everything that zipfile and NumPy raise on damaged files, as `Unusable`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a header that is an odd Python literal
            yield
    except (*_DAMAGE, OSError) as error:  # OSError: the damage sent zipfile to an impossible place
        raise Unusable(
            f"data: {name} is not an npz, or a damaged one ({one_line(error)}): write it again with "
            f"np.savez(path, images=images, labels=labels)"
        ) from None
