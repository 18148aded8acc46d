"""A labelled data set in one `.npz`. Every array is checked before it is read; nothing is ever unpickled."""

from __future__ import annotations

import difflib
import io
import json
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
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.image_encoding import ImageEncoding
from paragan.core.schema import from_dict
from paragan.data.decode import check_fits_memory
from paragan.data.formats.array import (
    ArraySource,
    DeepArraySource,
    check_image_shape,
    make_image_source,
    to_float32,
)
from paragan.data.formats.class_labels import choose_label_key
from paragan.data.formats.label_arrays import check_label_shape, parse_label_array
from paragan.data.formats.read_span import FileStamp, read_span
from paragan.data.source import LabelChoice
from paragan.data.storage.filesystem import FileSystem, abbreviate, format_error, printable

EXPECTED_KEYS = (
    "images (uint8, or other numbers, [N, H, W, C] or [N, H, W]) or x (float [N, ...]), "
    "labels (integers [N], optional), classes (names [K], optional)"
)

MAX_ENCODING_BYTES = 2**20
MIN_MMAP_BYTES = 2**28  # uncompressed images of this size or more are memory-mapped rather than read

_CORRUPTION_ERRORS = (
    # of the archive
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error, LookupError),
    # of an array's header, which is a Python literal
    *(ValueError, TypeError, SyntaxError, tokenize.TokenError, RecursionError, MemoryError, OverflowError),
)


@dataclass(frozen=True)
class ArrayHeader:
    """The header of an array in the archive.

    data_offset : bytes of the member before the data
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran_order: bool
    data_offset: int

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


class MmapSource(ArraySource):
    """Images of a memory-mapped file. Single ones are read from the file: touching a map whose file was truncated ends
    the process.

    Args:
        stamp: detects changes of the file.
        fs: its folder.
        name: its name.
        images: [N, H, W, C] uint8, the map.
        *args, **kwargs: as for `ArraySource`.
    """

    def __init__(self, stamp: FileStamp, fs: FileSystem, name: str, images: np.memmap, *args: Any, **kwargs: Any):
        super().__init__(fs.display_path(name), images, *args, **kwargs)
        self.stamp = stamp
        self.fs = fs
        self.file_name = name
        self.data_offset = images.offset

    def read(self, index: int) -> np.ndarray:
        """Return the pixels [H, W, C] of image `index`."""
        shape = self.array.shape[1:]
        size = math.prod(shape)
        with self.stamp.checked_read():
            data = read_span(self.fs, self.file_name, self.data_offset + index * size, size)
        return np.frombuffer(data, np.uint8).reshape(shape)


def read_npz(
    fs: FileSystem, name: str, *, labels: LabelChoice = True, channels: int | None = None
) -> ArraySource | DeepArraySource:
    """Read the data set in the npz `name`: `images`, or numbers `x`; with `labels` also its labels and classes.

    Images have 1, 3 or `channels` channels. Labels are called `labels`, or have another usual key, or the key that
    `labels` names.

    Large uncompressed images are memory-mapped rather than read; their checksum is not verified then.

    Numbers that `paragan data encode` wrote have an `encoding`.

    Raises:
        UsageError: it is not an npz, is damaged, or holds keys, types, shapes or labels that do not fit.
        OSError: the file cannot be read.
    """
    path = fs.display_path(name)
    stamp = FileStamp(fs, name)
    with open_archive(fs, name) as archive:
        keys = _list_keys(archive, path)
        label_key = choose_label_key(keys, labels, path)
        if labels and "classes" not in keys:
            _check_spelling_of_classes(keys, label_key, path)
        images, fingerprint = (
            _read_images(archive, path, fs, name, channels) if "images" in keys else (_read_x(archive, path), b"")
        )
        if labels and "classes" in keys and label_key is None:
            raise UsageError(f"data: {path} has classes but no labels: add labels, integers [{len(images)}]")
        encoding = None
        if "images" not in keys and "encoding" in keys:
            encoding = _read_encoding(archive, path, images.shape)
        numbers: np.ndarray | None = None
        classes: tuple[str, ...] = ()
        if label_key is not None:
            classes = read_classes(archive, path) if "classes" in keys else ()
            values = read_labels(archive, path, label_key, len(images))
            numbers, classes = parse_label_array(values, label_key, path, classes)
    ignored = [key for key in _ignored_keys(keys, label_key) if encoding is None or key != "encoding"]
    notes = (f"ignored keys: {abbreviate(ignored, 10)}",) if ignored else ()
    if label_key not in (None, "labels"):
        notes = (f"labels of key {printable(label_key)}", *notes)
    if isinstance(images, np.memmap):
        return MmapSource(stamp, fs, name, images, numbers, classes, notes, fingerprint)
    if "images" not in keys:
        return ArraySource(path, images, numbers, classes, notes, encoding=encoding)
    return make_image_source(path, images, numbers, classes, notes)


def read_npy(fs: FileSystem, name: str, *, channels: int | None = None) -> ArraySource | DeepArraySource:
    """Read an npy: images [N, H, W] or [N, H, W, C] of integers, without labels; or numbers [N, ...] of floats.

    Raises:
        UsageError: it is damaged, too large, or of another type or shape.
    """
    path = fs.display_path(name)
    check_fits_memory(fs.size(name), path, "store less")
    try:
        x = np.lib.format.read_array(io.BytesIO(fs.read(name)), allow_pickle=False)
    except _CORRUPTION_ERRORS as error:
        raise UsageError(
            f"data: {path} is not an array, or is damaged ({format_error(error)}): np.save(path, x)"
        ) from None
    if x.dtype.kind not in "uib" or x.ndim not in (3, 4):
        return ArraySource(path, to_float32(x, path))
    check_image_shape(x.shape, path, "the integers", channels)
    return make_image_source(path, x)


def _list_keys(archive: zipfile.ZipFile, location: str) -> list[str]:
    keys = [member.removesuffix(".npy") for member in archive.namelist() if member.endswith(".npy")]
    if "images" not in keys and "x" in keys:
        return keys
    if "images" not in keys and {"mu", "sigma"} <= {*keys}:
        raise UsageError(
            f"data: {location} holds moments of images (mu, sigma; see `paragan data stats`). Give the images"
        )
    if "images" not in keys:
        raise UsageError(
            f"data: {location} has no images; found {abbreviate(keys, 10) or 'nothing'}; expected {EXPECTED_KEYS}"
        )
    return keys


def _check_spelling_of_classes(keys: Sequence[str], label_key: str | None, location: str) -> None:
    """Raise UsageError for a key that looks like the names of classes, which are missing."""
    similar = difflib.get_close_matches("classes", _ignored_keys(keys, label_key), n=1)
    if similar:
        raise UsageError(
            f"data: {location} has {printable(similar[0])}, which should be called classes; expected "
            f"{EXPECTED_KEYS}; or use --data.labels=false"
        )


def _ignored_keys(keys: Sequence[str], label_key: str | None) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in ("images", "x", "labels", "classes", label_key))


def _read_images(
    archive: zipfile.ZipFile, location: str, fs: FileSystem, name: str, channels: int | None
) -> tuple[np.ndarray, bytes]:
    """Return images [N, H, W, C] or [N, H, W]; and their fingerprint if they are uint8 and mapped."""
    header = read_header(archive, location, "images")
    shape = header.shape
    dtype = header.dtype
    if dtype.kind not in "uifb":
        raise UsageError(f"data: {location}: images are {dtype}, expected numbers: {_conversion_hint(dtype)}")
    check_image_shape(shape, location, "images", channels)
    info = archive.getinfo("images.npy")
    is_stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
    if (
        dtype == np.uint8
        and fs.local_root
        and is_stored
        and header.nbytes >= MIN_MMAP_BYTES
        and not header.fortran_order
    ):
        member_offset = member_data_offset(fs, name, info)
        offset = member_offset + header.data_offset
        if offset + header.nbytes <= min(fs.size(name), member_offset + info.file_size):
            mapped = np.memmap(fs.local_root / name, np.uint8, "r", offset, shape)
            return mapped.reshape(*shape[:3], -1), f"images {shape} {info.CRC}".encode()
    check_array_fits_memory(header, location, "images")
    return read_array(archive, location, "images"), b""


def _read_x(archive: zipfile.ZipFile, location: str) -> np.ndarray:
    check_array_fits_memory(read_header(archive, location, "x"), location, "x")
    return to_float32(read_array(archive, location, "x"), location)


def _read_encoding(archive: zipfile.ZipFile, location: str, shape: tuple[int, ...]) -> ImageEncoding:
    """Return how the latents `x` [N, c, h, w] were made: JSON, the fields of `ImageEncoding`."""
    header = read_header(archive, location, "encoding")
    try:
        if header.dtype.kind != "U" or header.shape or header.nbytes > MAX_ENCODING_BYTES:
            raise ValueError(f"{header.dtype} {list(header.shape)} is no text")
        encoding = from_dict(ImageEncoding, json.loads(str(read_array(archive, location, "encoding"))))
        if len(shape) != 4 or not shape[1] == len(encoding.mean) == len(encoding.std):
            raise ValueError(f"it has {len(encoding.mean)} channels, and x is {list(shape)}")
    except (UsageError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(
            f"data: {location}: encoding cannot be read ({error}). Write the file again with `paragan data encode`"
        ) from None
    return encoding


def member_data_offset(fs: FileSystem, name: str, info: zipfile.ZipInfo) -> int:
    """Return where the data of a zip member starts: after its local header, which has two lengths at byte 26."""
    lengths = struct.unpack("<HH", fs.read(name, info.header_offset + 26, 4))
    return info.header_offset + 30 + sum(lengths)


def read_labels(archive: zipfile.ZipFile, location: str, key: str, count: int) -> np.ndarray:
    """Return the labels as they are stored."""
    header = read_header(archive, location, key)
    if header.dtype.kind == "O":
        name = printable(key)
        raise UsageError(
            f"data: {location}: {name} are objects, pickled, which are never loaded. Write names as np.array({name}, "
            f"dtype=str), numbers as np.array({name}, dtype=int), or use --data.labels=false"
        )
    check_label_shape(header.shape, key, location, count)
    check_array_fits_memory(header, location, key)
    return read_array(archive, location, key)


def read_classes(archive: zipfile.ZipFile, location: str) -> tuple[str, ...]:
    header = read_header(archive, location, "classes")
    shape = header.shape
    dtype = header.dtype
    if dtype.kind != "U" or len(shape) != 1 or not shape[0]:
        raise UsageError(
            f"data: {location}: classes are {dtype} {list(shape)}, expected one name a class: "
            "np.array(names, dtype=str)"
        )
    check_array_fits_memory(header, location, "classes")
    names = tuple(str(name) for name in read_array(archive, location, "classes"))
    most_common, count = Counter(names).most_common(1)[0]
    if count > 1:
        name = printable(repr(most_common)[:80])
        raise UsageError(f"data: {location}: {count} classes are called {name}: every class needs its own name")
    return names


def _conversion_hint(dtype: np.dtype) -> str:
    if dtype.kind == "O":
        return "these are pickled objects, which are never loaded; use np.stack(images) of equal uint8 arrays"
    return "save them as uint8 or another type of number"


def read_header(archive: zipfile.ZipFile, location: str, key: str) -> ArrayHeader:
    with reraise_as_usage_error(location), archive.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = parse(file)
        if any(side < 0 for side in shape):
            raise ValueError(f"{key} are {list(shape)}")
        return ArrayHeader(shape, dtype, fortran_order, file.tell())


def check_array_fits_memory(header: ArrayHeader, location: str, key: str) -> None:
    check_fits_memory(header.nbytes, f"{location}: {key} {list(header.shape)}", "store smaller or fewer images")


def read_array(archive: zipfile.ZipFile, location: str, key: str) -> np.ndarray:
    with reraise_as_usage_error(location), archive.open(f"{key}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


@contextmanager
def open_archive(fs: FileSystem, name: str) -> Iterator[zipfile.ZipFile]:
    path = fs.display_path(name)
    if fs.is_remote:
        check_fits_memory(fs.size(name), path, "copy it to this machine")
    with io.BytesIO(fs.read(name)) if fs.is_remote else fs.open(name) as file:
        with reraise_as_usage_error(path):
            archive = zipfile.ZipFile(file)
        with archive:
            _name_positional_arrays(archive, path)
            yield archive


def _name_positional_arrays(archive: zipfile.ZipFile, location: str) -> None:
    """Give `arr_0` and `arr_1` of `np.savez(path, images, labels)`, as guided-diffusion writes them, their names."""
    infos = archive.NameToInfo
    if "arr_0.npy" not in infos or not infos.keys().isdisjoint({"images.npy", "x.npy"}):
        return
    images = read_header(archive, location, "arr_0")
    if images.dtype != np.uint8 or len(images.shape) not in (3, 4):
        return
    names = {"arr_0.npy": "images.npy"}
    if "arr_1.npy" in infos and "labels.npy" not in infos:
        labels = read_header(archive, location, "arr_1")
        if labels.dtype.kind in "iu" and labels.shape == images.shape[:1]:
            names["arr_1.npy"] = "labels.npy"
    for old, new in names.items():
        infos[old].filename = new  # zipfile compares the stored name with orig_filename
        infos[new] = infos.pop(old)


@contextmanager
def reraise_as_usage_error(location: str) -> Iterator[None]:
    """Raise UsageError for everything that zipfile and NumPy raise on damaged files."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a header that is an odd Python literal
            yield
    except (*_CORRUPTION_ERRORS, OSError) as error:  # OSError: damage made zipfile seek to an impossible position
        raise UsageError(
            f"data: {location} is not an npz, or is damaged ({format_error(error)}). Write it again with "
            f"np.savez(path, images=images, labels=labels)"
        ) from None
