"""A labelled set in one HDF5 file, as BigGAN and StudioGAN keep it: `imgs` [N, C, H, W] uint8 and `labels` [N]."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.dataset_json import resolve_class_names
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import MAX_RECORD_BYTES, FileStamp, read_span
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import FileSystem, format_error, printable
from paragan.data.storage.local import LocalFileSystem

EXPECTED_KEYS = (
    "imgs (uint8 [N, C, H, W] or [N, H, W, C]), labels (integers [N], optional), classes (names [K], optional)"
)

_IMAGE_KEYS = ("imgs", "images")
_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32, lzf: what h5py itself brings
_MAX_COMPRESSION_RATIO = 1100  # how much smaller than its data a file can be: deflate makes 1,032 bytes of one
_CHUNK_CACHE_BYTES = 2**26  # bytes of unpacked chunks that HDF5 keeps
_FINGERPRINT_IMAGES = 16  # images that tell a set from others

# What h5py makes of HDF5's complaints.
_CORRUPTION_ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    MemoryError,
    NotImplementedError,
)


class Hdf5Source:
    """Images of an HDF5 file, one at a time: h5py is not for many threads, so they wait for each other.

    Not so where images lie in one piece and plain: then their bytes are read without h5py.
    """

    array = None

    def __init__(
        self,
        stamp: FileStamp,
        fs: FileSystem,
        file_name: str,
        images: Any,
        channels_first: bool,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.fs, self.file_name, self.location, self.is_local = (
            fs,
            file_name,
            fs.display_path(file_name),
            not fs.is_remote,
        )
        self.stamp, self.images, self.channels_first = stamp, images, channels_first
        self.labels, self.classes, self.notes = labels, classes, notes
        self.shape = tuple(int(side) for side in images.shape)  # [N, C, H, W] if the channels come `first`
        self.data_offset = _data_offset(images, fs.size(file_name))
        with _reraise_as_usage_error(self.location):
            self.intact_rows = _intact_rows(images, fs.size(file_name)) if images.chunks else None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, index: int) -> np.ndarray:
        if self.intact_rows is not None and not self.intact_rows[index // self.images.chunks[0]]:
            raise DecodeError("the chunk of the file that holds it is damaged or missing")
        if self.data_offset is None:
            self.stamp.check_unchanged()  # HDF5 itself crashes on some files that were written over
            with self.stamp.checked_read(), self._lock:
                try:
                    image = self.images[index]
                except _CORRUPTION_ERRORS as error:
                    raise DecodeError(format_error(error)) from None
        else:
            size = math.prod(self.shape[1:])
            with self.stamp.checked_read():
                data = read_span(self.fs, self.file_name, self.data_offset + index * size, size)
            image = np.frombuffer(data, np.uint8).reshape(self.shape[1:])
        return np.ascontiguousarray(image.transpose(1, 2, 0)) if self.channels_first else image

    def sample_name(self, index: int) -> str:
        return f"{self.location}, image {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """The format has no checksum of all: shape, size, and the pixels of a few."""
        yield repr((self.shape, self.fs.size(self.file_name))).encode()
        for index in np.unique(np.linspace(0, len(self) - 1, _FINGERPRINT_IMAGES).astype(int)):
            try:
                yield self.read(int(index)).tobytes()
            except DecodeError as error:
                yield str(error).encode()


def open_hdf5(fs: FileSystem, name: str, *, labels: bool = True) -> Hdf5Source:
    """The set in the HDF5 file `name`. Nothing that it links to in other files is followed."""
    import h5py  # slow to import, and only needed here

    where, steady, opened = fs.display_path(name), FileStamp(fs, name), fs.open(name)
    how: Any = opened
    if isinstance(fs, LocalFileSystem) and not fs.is_remote:
        opened.close()  # it may be read: the rest is HDF5's, which is faster with a path
        how = fs.root / name
    with _reraise_as_usage_error(where):
        file = h5py.File(how, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES, locking=False)
    try:
        key, images = _find_images(file, where, fs.size(name))
        first = len(images.shape) == 4 and images.shape[3] not in (1, 3)
        names = _read_classes(file, where, fs.size(name))
        numbers = _read_labels(file, where, images.shape[0], fs.size(name), len(names) or None) if labels else None
        others = _list_keys(file, where) - {key, "labels"} - ({"classes"} if names else set())
        notes = [f"ignored keys: {_abbreviate(others)}"] * bool(others)
        if images.chunks and images.chunks[0] > 1 and images.compression:
            notes += [f"compressed in chunks of {images.chunks[0]:,} images: each is unpacked for any of them"]
        return Hdf5Source(steady, fs, name, images, first, numbers, resolve_class_names(numbers, names), tuple(notes))
    except UsageError:
        with contextlib.suppress(*_CORRUPTION_ERRORS):
            file.close()
        raise


def _list_keys(file: Any, location: str) -> set[str]:
    with _reraise_as_usage_error(location):
        return {printable(key) for key in file}


def _abbreviate(keys: set[str]) -> str:
    return ", ".join(sorted(keys)[:10])[:300] + ", ..." * (len(keys) > 10) or "nothing"


def _checked_dataset(file: Any, location: str, key: str, size: int) -> Any:
    """A dataset that lies in this file, of which not more is claimed than can be in it."""
    import h5py

    with _reraise_as_usage_error(location):
        if not isinstance(file.get(key, getlink=True), h5py.HardLink):
            raise UsageError(
                f"data: {location}: {key} is a link to elsewhere, which is not followed: copy the data into it"
            )
        found = file[key]
        if not isinstance(found, h5py.Dataset):
            raise UsageError(f"data: {location}: {key} is not an array; wanted {EXPECTED_KEYS}")
        if found.is_virtual or found.external:
            raise UsageError(
                f"data: {location}: {key} lies in other files, which are not followed: copy the data into it"
            )
        plan = found.id.get_create_plist()
        filters = [int(plan.get_filter(i)[0]) for i in range(plan.get_nfilters())]
        if not _FILTERS.issuperset(filters):
            known = "gzip or lzf"
            raise UsageError(
                f"data: {location}: {key} is packed by filter {filters[0]}, unknown here: write it with {known}"
            )
        if found.shape is None or found.size * found.dtype.itemsize > _MAX_COMPRESSION_RATIO * size:
            raise UsageError(
                f"data: {location}: {key} claims to hold more than the file can, it is damaged: write it again"
            )
        if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > MAX_RECORD_BYTES:
            raise UsageError(
                f"data: {location}: {key} has chunks of more than {MAX_RECORD_BYTES:,} bytes: write it with smaller ones"
            )
        return found


def _find_images(file: Any, location: str, size: int) -> tuple[str, Any]:
    keys = _list_keys(file, location)
    key = next((key for key in _IMAGE_KEYS if key in keys), None)
    if key is None:
        raise UsageError(f"data: {location} has no imgs; found {_abbreviate(keys)}; wanted {EXPECTED_KEYS}")
    images = _checked_dataset(file, location, key, size)
    shape = list(images.shape)
    if images.dtype != np.uint8:
        raise UsageError(
            f"data: {location}: {key} are {images.dtype}, wanted uint8 in 0..255: convert and write them again"
        )
    if len(shape) not in (3, 4) or (len(shape) == 4 and not {shape[1], shape[3]} & {1, 3}):
        raise UsageError(f"data: {location}: {key} are {shape}, wanted [N, C, H, W] or [N, H, W, C] with C 1 or 3")
    if 0 in shape:
        raise UsageError(f"data: {location}: {key} are {shape}, no image: give at least one")
    if math.prod(shape[1:]) > MAX_RECORD_BYTES:
        raise UsageError(
            f"data: {location}: {key} are {shape}, an image of more than {MAX_RECORD_BYTES:,} bytes: make them smaller"
        )
    return key, images


def _read_classes(file: Any, location: str, size: int) -> tuple[str, ...]:
    """The names of classes, if there are such: different strings of fixed width in UTF-8. Anything else is ignored."""
    if "classes" not in _list_keys(file, location):
        return ()
    found = _checked_dataset(file, location, "classes", size)
    if found.dtype.kind != "S" or len(found.shape) != 1:
        return ()
    with _reraise_as_usage_error(location):
        names = tuple(printable(name.decode(errors="replace")) for name in found[:].tolist())
    return names if len(set(names)) == len(names) else ()


def _read_labels(file: Any, location: str, count: int, size: int, classes: int | None) -> np.ndarray | None:
    if "labels" not in _list_keys(file, location):
        return None
    labels = _checked_dataset(file, location, "labels", size)
    if labels.dtype.kind not in "iu":
        raise UsageError(f"data: {location}: labels are {labels.dtype}, wanted integers: write labels.astype('int64')")
    if labels.shape != (count,):
        raise UsageError(f"data: {location}: labels are {list(labels.shape)}, wanted [{count}], one an image")
    with _reraise_as_usage_error(location):
        numbers = labels[:]
    check_labels(numbers, location, classes)
    return numbers.astype(np.int64)


def _data_offset(images: Any, size: int) -> int | None:
    """Where the images begin in the file, if they lie there in one piece and plain."""
    start = None if images.chunks or images.compression else images.id.get_offset()
    return start if start is not None and start + images.size <= size else None


def _intact_rows(images: Any, size: int) -> np.ndarray:
    """[rows of chunks] bool: whether all chunks of a row lie in the file. HDF5 itself crashes on some that do not."""
    rows, *across = (-(-side // chunk) for side, chunk in zip(images.shape, images.chunks))
    found = np.zeros(rows, np.int64)

    def count_chunk(chunk: Any) -> None:
        row = chunk.chunk_offset[0] // images.chunks[0]
        if row < rows and chunk.size > 0 and chunk.byte_offset + chunk.size <= size:
            found[row] += 1
        elif row < rows:
            found[row] = -(2**40)

    images.id.chunk_iter(count_chunk)
    return found == math.prod(across)


@contextmanager
def _reraise_as_usage_error(location: str) -> Iterator[None]:
    try:
        yield
    except _CORRUPTION_ERRORS as error:
        reason = format_error(error)
        raise UsageError(f"data: {location} is no HDF5 file, or a damaged one ({reason}): write it again") from None
