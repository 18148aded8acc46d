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

from paragan.core.errors import UsageError
from paragan.data.decode import ram_bytes
from paragan.data.formats.array import ArraySource, to_float32
from paragan.data.formats.read_span import FileStamp, read_span
from paragan.data.storage.filesystem import FileSystem, format_error, printable
from paragan.data.storage.local import LocalFileSystem

EXPECTED_KEYS = (
    "images (uint8 [N, H, W, C] or [N, H, W]) or x (float [N, ...]), labels (integers [N], optional), "
    "classes (names [K], optional)"
)

MIN_MMAP_BYTES = (
    2**28
)  # bytes of images from which on they are mapped into memory rather than read, if they are not compressed

_CORRUPTION_ERRORS = (
    # of the archive
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error, LookupError),
    # of an array's header, which is a Python literal
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError, OverflowError),
)


@dataclass(frozen=True)
class _ArrayHeader:
    """What an array in the archive is, before its data is read."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    data_offset: int  # bytes before its data

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class MmapSource(ArraySource):
    """Images mapped from a file. Single ones are read from it: touching a map whose file was cut ends the process."""

    def __init__(self, stamp: FileStamp, fs: FileSystem, name: str, images: np.ndarray, *args: Any, **kwargs: Any):
        super().__init__(fs.display_path(name), images, *args, **kwargs)
        self.stamp, self.fs, self.file_name, self.data_offset = stamp, fs, name, images.offset  # pyright: ignore[reportAttributeAccessIssue]

    def read(self, index: int) -> np.ndarray:
        shape = self.array.shape[1:]
        size = math.prod(shape)
        with self.stamp.checked_read():
            data = read_span(self.fs, self.file_name, self.data_offset + index * size, size)
        return np.frombuffer(data, np.uint8).reshape(shape)


def read_npz(fs: FileSystem, name: str, *, labels: bool = True) -> ArraySource:
    """Read the set in the file `name`, images or numbers `x`; without `labels` theirs are not even looked at.

    Large images that are not compressed are mapped rather than read: then nobody checks their checksum.

    Raises `Unusable` for what is not an npz, is damaged, or holds keys, types, shapes or labels that do not
    fit; `OSError` if the file cannot be read.
    """
    where, steady = fs.display_path(name), FileStamp(fs, name)
    with _open_archive(fs, name) as archive:
        keys = _list_keys(archive, where)
        images, mark = _read_images(archive, where, fs, name) if "images" in keys else (_read_x(archive, where), b"")
        if labels and "classes" in keys and "labels" not in keys:
            raise UsageError(f"data: {where} has classes but no labels: add labels, integers [{len(images)}]")
        mapped = isinstance(images, np.memmap)
        made = partial(MmapSource, steady, fs, name) if mapped else partial(ArraySource, where)
        others = _ignored_keys(keys)
        notes = (f"ignored keys: {_abbreviate(others)}",) * bool(others)
        if not labels or "labels" not in keys:
            return made(images, notes=notes, fingerprint=mark)
        names = _read_classes(archive, where) if "classes" in keys else None
        numbers = _read_labels(archive, where, len(images))
        check_labels(numbers, where, None if names is None else len(names))
        classes = names or tuple(str(label) for label in range(int(numbers.max()) + 1))
        return made(images, numbers.astype(np.int64), classes, notes, mark)


def read_npy(fs: FileSystem, name: str) -> ArraySource:
    """Numbers [N, ...] in one array, without labels."""
    where = fs.display_path(name)
    if fs.size(name) > ram_bytes() // 2:
        raise UsageError(f"data: {where} is larger than half of this machine's memory: store less")
    try:
        x = np.lib.format.read_array(io.BytesIO(fs.read(name)), allow_pickle=False)
    except _CORRUPTION_ERRORS as error:
        raise UsageError(
            f"data: {where} is no array, or a damaged one ({format_error(error)}): np.save(path, x)"
        ) from None
    return ArraySource(where, to_float32(x, where))


def check_labels(labels: np.ndarray, location: str, num_classes: int | None) -> None:
    """Raise `Unusable` unless `labels` [N] lie in 0..classes-1; if None, in 0..max with an image for each."""
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0:
        count = int((labels < 0).sum())
        raise UsageError(f"data: {location}: {count:,} of {len(labels):,} labels are negative ({lowest}): count from 0")
    if num_classes is not None:
        if highest >= num_classes:
            raise UsageError(
                f"data: {location}: label {highest} but {num_classes} classes: labels must lie in 0..{num_classes - 1}"
            )
        return
    seen = np.unique(labels)
    if missing := highest + 1 - len(seen):
        candidates = np.arange(min(highest + 1, len(seen) + 5))  # holds the first five, however large the labels
        first = ", ".join(str(label) for label in np.setdiff1d(candidates, seen)[:5])
        raise UsageError(
            f"data: {location}: labels go up to {highest}, but {missing:,} of these classes have no image "
            f"({first}{', ...' if missing > 5 else ''}): "
            f"renumber with np.unique(labels, return_inverse=True)[1]"
        )


def _list_keys(archive: zipfile.ZipFile, location: str) -> list[str]:
    keys = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
    if "images" not in keys and "x" in keys:
        return keys
    if "images" not in keys and {"mu", "sigma"} <= {*keys}:
        raise UsageError(
            f"data: {location} holds moments of images (mu, sigma; see `paragan data stats`): give the images"
        )
    if "images" not in keys:
        raise UsageError(f"data: {location} has no images; found {_abbreviate(keys)}; wanted {EXPECTED_KEYS}")
    for wanted in ("labels", "classes"):
        near = difflib.get_close_matches(wanted, _ignored_keys(keys), n=1)
        if near and wanted not in keys:
            raise UsageError(
                f"data: {location} has {printable(near[0])}, which should be called {wanted}; wanted {EXPECTED_KEYS}"
            )
    return keys


def _ignored_keys(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in ("images", "x", "labels", "classes"))


def _abbreviate(keys: Sequence[str]) -> str:
    return ", ".join(printable(key)[:80] for key in keys[:10]) + ", ..." * (len(keys) > 10) or "nothing"


def _read_images(archive: zipfile.ZipFile, location: str, fs: FileSystem, name: str) -> tuple[np.ndarray, bytes]:
    """[N, H, W, C] uint8, and what tells them from others if that is known without reading them."""
    head = _read_header(archive, location, "images")
    shape, dtype = head.shape, head.dtype
    if dtype != np.uint8:
        raise UsageError(f"data: {location}: images are {dtype}, wanted uint8 in 0..255: {_conversion_hint(dtype)}")
    if len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        raise UsageError(
            f"data: {location}: images are {list(shape)}, wanted [N, H, W, C]: "
            f"images.transpose(0, 2, 3, 1) moves the channels"
        )
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise UsageError(f"data: {location}: images are {list(shape)}, wanted [N, H, W, C] with C 1 or 3, or [N, H, W]")
    if 0 in shape:
        raise UsageError(f"data: {location}: images are {list(shape)}, no image: give at least one")
    info = archive.getinfo("images.npy")
    stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    if (
        isinstance(fs, LocalFileSystem)
        and not fs.is_remote
        and stored
        and head.nbytes >= MIN_MMAP_BYTES
        and not head.fortran_order
    ):
        at = _member_data_offset(fs, name, info) + head.data_offset
        if at + head.nbytes <= min(fs.size(name), at - head.data_offset + info.file_size):
            mapped = np.memmap(fs.root / name, np.uint8, "r", at, shape)
            return mapped.reshape(*shape[:3], -1), f"images {shape} {info.CRC}".encode()
    _check_fits_memory(head, location, "images")
    return np.ascontiguousarray(_read_array(archive, location, "images")).reshape(*shape[:3], -1), b""


def _read_x(archive: zipfile.ZipFile, location: str) -> np.ndarray:
    _check_fits_memory(_read_header(archive, location, "x"), location, "x")
    return to_float32(_read_array(archive, location, "x"), location)


def _member_data_offset(fs: FileSystem, name: str, info: zipfile.ZipInfo) -> int:
    """Where the bytes of a member start: behind its local header, which has two lengths at 26."""
    lengths = struct.unpack("<HH", fs.read(name, info.header_offset + 26, 4))
    return info.header_offset + 30 + sum(lengths)


def _read_labels(archive: zipfile.ZipFile, location: str, count: int) -> np.ndarray:  # [N], integers of any type
    head = _read_header(archive, location, "labels")
    shape, dtype = head.shape, head.dtype
    if dtype.kind not in "iu":
        raise UsageError(f"data: {location}: labels are {dtype}, wanted integers: labels.astype(np.int64)")
    if len(shape) != 1:
        remedy = "labels.argmax(1)" if len(shape) == 2 and shape[1] > 1 else "labels.reshape(-1)"
        raise UsageError(f"data: {location}: labels are {list(shape)}, wanted [{count}], one an image: {remedy}")
    if shape[0] != count:
        raise UsageError(f"data: {location}: {shape[0]:,} labels for {count:,} images: give one label an image")
    _check_fits_memory(head, location, "labels")
    return _read_array(archive, location, "labels")


def _read_classes(archive: zipfile.ZipFile, location: str) -> tuple[str, ...]:
    head = _read_header(archive, location, "classes")
    shape, dtype = head.shape, head.dtype
    if dtype.kind != "U" or len(shape) != 1 or not shape[0]:
        raise UsageError(
            f"data: {location}: classes are {dtype} {list(shape)}, wanted one name a class: np.array(names, dtype=str)"
        )
    _check_fits_memory(head, location, "classes")
    names = tuple(str(one) for one in _read_array(archive, location, "classes"))
    twice, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise UsageError(
            f"data: {location}: {count} classes are called {printable(repr(twice)[:80])}: every class needs its own name"
        )
    return names


def _conversion_hint(dtype: np.dtype) -> str:
    if dtype.kind == "O":
        return "these are pickled objects, which are never loaded; np.stack(images) of equal uint8 arrays"
    if dtype.kind == "f":
        return "(images * 255).round().astype(np.uint8) from [0, 1]; from [-1, 1] the same of (images + 1) / 2"
    if dtype.kind == "b":
        return "images.astype(np.uint8) * 255"
    return "images.astype(np.uint8) if they are in 0..255"


def _read_header(archive: zipfile.ZipFile, location: str, key: str) -> _ArrayHeader:
    with _reraise_as_usage_error(location), archive.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = parse(file)
        if any(side < 0 for side in shape):
            raise ValueError(f"{key} are {list(shape)}")
        return _ArrayHeader(shape, dtype, fortran, file.tell())


def _check_fits_memory(head: _ArrayHeader, location: str, key: str) -> None:
    need, limit = head.nbytes, ram_bytes() // 2
    if need > limit:
        raise UsageError(
            f"data: {location}: {key} {list(head.shape)} need {need / 2**30:,.1f} GiB, more than half of "
            f"this machine's {2 * limit / 2**30:,.1f} GiB of memory: store smaller or fewer images"
        )


def _read_array(archive: zipfile.ZipFile, location: str, key: str) -> np.ndarray:
    with _reraise_as_usage_error(location), archive.open(f"{key}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


@contextmanager
def _open_archive(fs: FileSystem, name: str) -> Iterator[zipfile.ZipFile]:
    where = fs.display_path(name)
    if fs.is_remote and fs.size(name) > ram_bytes() // 2:
        raise UsageError(f"data: {where} is larger than half of this machine's memory: copy it to this machine")
    with io.BytesIO(fs.read(name)) if fs.is_remote else fs.open(name) as file:
        with _reraise_as_usage_error(where):
            archive = zipfile.ZipFile(file)
        with archive:
            yield archive


@contextmanager
def _reraise_as_usage_error(location: str) -> Iterator[None]:
    """Everything that zipfile and NumPy raise on damaged files, as `Unusable`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a header that is an odd Python literal
            yield
    except (*_CORRUPTION_ERRORS, OSError) as error:  # OSError: the damage sent zipfile to an impossible place
        raise UsageError(
            f"data: {location} is not an npz, or a damaged one ({format_error(error)}): write it again with "
            f"np.savez(path, images=images, labels=labels)"
        ) from None
