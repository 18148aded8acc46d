"""A labelled data set in one HDF5 file, as BigGAN and StudioGAN store it: `imgs` [N, C, H, W] uint8, `labels` [N].

HDF5 crashes on some damaged files, so sizes, chunks and filters are checked before it reads data.
"""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.core.image_shape import MAX_CHANNELS, PICTURE_CHANNELS, channels_option
from paragan.data.decode import check_fits_memory
from paragan.data.formats.class_labels import choose_label_key
from paragan.data.formats.label_arrays import check_label_shape, parse_label_array
from paragan.data.formats.read_span import FileStamp, max_record_bytes, read_span
from paragan.data.source import DecodeError, LabelChoice
from paragan.data.storage.filesystem import FileSystem, abbreviate, format_error, printable

EXPECTED_KEYS = (
    "imgs (uint8, or other numbers, [N, C, H, W] or [N, H, W, C]), labels (integers [N], optional), "
    "classes (names [K], optional)"
)

_IMAGE_KEYS = ("imgs", "images")
_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32, lzf: those that h5py always has
_MAX_COMPRESSION_RATIO = 1100  # deflate makes at most 1,032 bytes of one
_CHUNK_CACHE_BYTES = 2**26  # of decompressed chunks
_FINGERPRINT_IMAGES = 16

# Strings of variable length lie in a global heap: (length, address of a collection, index in it) is stored for each.
_HEAP_REFERENCE = struct.Struct("<LQL")
_HEAP_HEADER = struct.Struct("<4s4xQ")  # of a collection: signature, size
_HEAP_OBJECT = struct.Struct("<H6xQ")  # of an object: index, size
_MAX_HEAP_BYTES = 2**24  # of a collection

# What h5py raises for errors of HDF5.
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
    """The images of an HDF5 file.

    Contiguous uncompressed images are read as bytes of the file. Others are read by h5py, which is not thread-safe, so
    under a lock.

    Args:
        stamp: detects changes of the file.
        fs: its folder.
        file_name: its name.
        images: the h5py data set.
        channels_first: whether it is [N, C, H, W] rather than [N, H, W, C].
        labels: [N] int64, or None.
        classes: [K] names.
        notes: lines for `describe`.
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
        self.fs = fs
        self.file_name = file_name
        self.location = fs.display_path(file_name)
        self.is_local = not fs.is_remote
        self.stamp = stamp
        self.images = images
        self.channels_first = channels_first
        self.labels = labels
        self.classes = classes
        self.notes = notes
        self.shape = tuple(int(side) for side in images.shape)
        self.data_offset = _data_offset(images, fs.size(file_name))
        with _reraise_as_usage_error(self.location):
            self.intact_rows = _intact_rows(images, fs.size(file_name)) if images.chunks else None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, index: int) -> np.ndarray:
        """Return the pixels [H, W, C] of image `index`."""
        if self.intact_rows is not None and not self.intact_rows[index // self.images.chunks[0]]:
            raise DecodeError("the chunk of the file that holds it is damaged or missing")
        if self.data_offset is None:
            self.stamp.check_unchanged()  # HDF5 crashes on some files that were overwritten
            with self.stamp.checked_read(), self._lock:
                try:
                    image = self.images[index]
                except _CORRUPTION_ERRORS as error:
                    raise DecodeError(format_error(error)) from None
        else:
            dtype = self.images.dtype
            size = dtype.itemsize * math.prod(self.shape[1:])
            with self.stamp.checked_read():
                data = read_span(self.fs, self.file_name, self.data_offset + index * size, size)
            image = np.frombuffer(data, dtype).reshape(self.shape[1:])
        image = image.astype(image.dtype.newbyteorder("="), copy=False)
        return np.ascontiguousarray(image.transpose(1, 2, 0)) if self.channels_first else image

    def sample_name(self, index: int) -> str:
        """Return what messages call image `index`."""
        return f"{self.location}, image {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield shape, file size and the pixels of a few images: the format has no checksum of all."""
        yield repr((self.shape, self.fs.size(self.file_name))).encode()
        for index in np.unique(np.linspace(0, len(self) - 1, _FINGERPRINT_IMAGES).astype(int)):
            try:
                yield self.read(int(index)).tobytes()
            except DecodeError as error:
                yield str(error).encode()


def open_hdf5(fs: FileSystem, name: str, *, labels: LabelChoice = True, channels: int | None = None) -> Hdf5Source:
    """Open the data set in the HDF5 file `name`. Links to other files are not followed.

    Images have 1, 3 or `channels` channels, last or first.

    Raises:
        UsageError: it is not HDF5, is damaged, or holds arrays that do not fit.
    """
    path = fs.display_path(name)
    stamp = FileStamp(fs, name)
    file = open_file(fs, name)
    try:
        key, images = _find_images(file, path, fs.size(name), channels)
        channels_first = len(images.shape) == 4 and images.shape[3] not in (*PICTURE_CHANNELS, channels)
        names = read_classes(fs, name, file)
        has_names = bool(names)
        keys = list_keys(file, path)
        label_key = choose_label_key(keys - {key}, labels, path)
        numbers: np.ndarray | None = None
        notes: list[str] = []
        if label_key:
            values = read_labels(fs, name, file, label_key, images.shape[0])
            numbers, names = parse_label_array(values, label_key, path, names)
        if label_key not in (None, "labels"):
            notes.append(f"labels of key {label_key}")
        ignored = keys - {key, "labels", label_key} - ({"classes"} if has_names else set())
        if ignored:
            notes.append(f"ignored keys: {_abbreviate_keys(ignored)}")
        if images.chunks and images.chunks[0] > 1 and images.compression:
            notes.append(f"compressed in chunks of {images.chunks[0]:,} images: each is decompressed for any of them")
        classes = () if numbers is None else names
        return Hdf5Source(stamp, fs, name, images, channels_first, numbers, classes, tuple(notes))
    except UsageError:
        with contextlib.suppress(*_CORRUPTION_ERRORS):
            file.close()
        raise


def open_file(fs: FileSystem, name: str) -> Any:
    """Open an HDF5 file with h5py.

    Raises:
        UsageError: it is not HDF5, or is damaged.
    """
    import h5py  # slow to import

    opened = fs.open(name)
    file_or_path: Any = opened
    if fs.local_root is not None:
        opened.close()  # it can be read; HDF5 is faster with a path
        file_or_path = fs.local_root / name
    with _reraise_as_usage_error(fs.display_path(name)):
        return h5py.File(file_or_path, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES, locking=False)


def open_field(fs: FileSystem, name: str, file: Any, key: str) -> Hdf5Source:
    """Return an array [N, ...] of numbers in an opened file, whose records are read one by one.

    Raises:
        UsageError: it is no such array, or is damaged.
    """
    path = fs.display_path(name)
    dataset = _checked_dataset(file, path, key, fs.size(name))
    if dataset.dtype.kind not in "uif" or not dataset.shape:
        raise UsageError(f"data: {path}: {printable(key)} is {dataset.dtype}, expected numbers [N, ...]. Leave it out")
    return Hdf5Source(FileStamp(fs, name), fs, name, dataset, False, None, (), ())


def list_keys(file: Any, location: str) -> set[str]:
    with _reraise_as_usage_error(location):
        return {printable(key) for key in file}


def _abbreviate_keys(keys: set[str]) -> str:
    return abbreviate(sorted(keys), 10) or "nothing"


def _checked_dataset(file: Any, location: str, key: str, size: int) -> Any:
    """Return an h5py data set that lies in this file and is not larger than a file of `size` bytes can hold."""
    import h5py

    with _reraise_as_usage_error(location):
        if not isinstance(file.get(key, getlink=True), h5py.HardLink):
            raise UsageError(f"data: {location}: {key} is a link, which is not followed: copy the data into the file")
        dataset = file[key]
        if not isinstance(dataset, h5py.Dataset):
            raise UsageError(f"data: {location}: {key} is not an array; expected {EXPECTED_KEYS}")
        if dataset.is_virtual or dataset.external:
            raise UsageError(
                f"data: {location}: {key} lies in other files, which are not followed: copy the data into the file"
            )
        properties = dataset.id.get_create_plist()
        filters = [int(properties.get_filter(i)[0]) for i in range(properties.get_nfilters())]
        if unknown := [number for number in filters if number not in _FILTERS]:
            raise UsageError(
                f"data: {location}: {key} is compressed by filter {unknown[0]}, which is not supported. "
                "Write it with gzip or lzf"
            )
        if dataset.shape is None or dataset.size * dataset.dtype.itemsize > _MAX_COMPRESSION_RATIO * size:
            raise ValueError(f"{key} claims to hold more than the file can")
        if dataset.chunks and math.prod(dataset.chunks) * dataset.dtype.itemsize > max_record_bytes():
            raise UsageError(
                f"data: {location}: {key} has chunks of more than {max_record_bytes():,} bytes. Use smaller chunks"
            )
        return dataset


def _find_images(file: Any, location: str, size: int, channels: int | None) -> tuple[str, Any]:
    keys = list_keys(file, location)
    key = next((key for key in _IMAGE_KEYS if key in keys), None)
    if key is None:
        raise UsageError(f"data: {location} has no imgs; found {_abbreviate_keys(keys)}; expected {EXPECTED_KEYS}")
    images = _checked_dataset(file, location, key, size)
    shape = list(images.shape)
    if images.dtype.kind not in "uif":
        raise UsageError(
            f"data: {location}: {key} are {images.dtype}, expected numbers. Write them as uint8 or another type of "
            "number, true as 255"
        )
    if len(shape) not in (3, 4) or (len(shape) == 4 and not {shape[1], shape[3]} & {*PICTURE_CHANNELS, channels}):
        number = min(shape[1], shape[3]) if len(shape) == 4 else 0
        option = f". Use {channels_option(number)} to read all" if 0 < number <= MAX_CHANNELS else ""
        raise UsageError(
            f"data: {location}: {key} are {shape}, expected [N, C, H, W] or [N, H, W, C] with C 1 or 3{option}"
        )
    if 0 in shape:
        raise UsageError(f"data: {location}: {key} are {shape}, no image. Give at least one")
    num_bytes = images.dtype.itemsize * math.prod(shape[1:])
    if num_bytes > max_record_bytes():
        raise UsageError(
            f"data: {location}: {key} are {shape}, an image of more than {max_record_bytes():,} bytes: make them "
            f"smaller, or use --data.max_pixels={-(-num_bytes // 4)}"
        )
    return key, images


def read_classes(fs: FileSystem, file_name: str, file: Any) -> tuple[str, ...]:
    """Return the names of the classes, if `classes` holds unique UTF-8 strings; else ()."""
    import h5py

    location = fs.display_path(file_name)
    if "classes" not in list_keys(file, location):
        return ()
    dataset = _checked_dataset(file, location, "classes", fs.size(file_name))
    if len(dataset.shape) != 1:
        return ()
    values: list[bytes] = []
    with _reraise_as_usage_error(location):
        if dataset.dtype.kind == "S":
            values = dataset[:].tolist()
        elif h5py.check_string_dtype(dataset.dtype) and not dataset.chunks:
            values = _read_heap_strings(fs, file_name, dataset)
    names = tuple(printable(name.decode(errors="replace")) for name in values)
    return names if len(set(names)) == len(names) else ()


def _read_heap_strings(fs: FileSystem, file_name: str, dataset: Any) -> list[bytes]:
    """Return strings of variable length. HDF5 does not end on some damaged heaps, so the bytes are read here.

    Raises:
        ValueError: they are damaged.
    """
    start = dataset.id.get_offset()
    if start is None:
        return []
    heaps: dict[int, dict[int, bytes]] = {}
    values: list[bytes] = []
    try:
        references = fs.read(file_name, start, dataset.shape[0] * _HEAP_REFERENCE.size)
        for length, address, index in _HEAP_REFERENCE.iter_unpack(references):
            if address not in heaps:
                heaps[address] = _read_heap(fs, file_name, address)
            values.append(heaps[address][index][:length])
    except (DecodeError, struct.error, LookupError, OverflowError, OSError) as error:
        raise ValueError(f"names of classes: {error}") from None
    return values


def _read_heap(fs: FileSystem, file_name: str, address: int) -> dict[int, bytes]:
    """Return the objects of a collection of the global heap by index."""
    signature, size = _HEAP_HEADER.unpack(fs.read(file_name, address, _HEAP_HEADER.size))
    if signature != b"GCOL" or size > _MAX_HEAP_BYTES:
        raise LookupError("their heap is damaged")
    data = fs.read(file_name, address, size)
    objects: dict[int, bytes] = {}
    position = _HEAP_HEADER.size
    while position + _HEAP_OBJECT.size <= size:
        index, length = _HEAP_OBJECT.unpack_from(data, position)
        if not index:
            break  # the rest is free
        position += _HEAP_OBJECT.size
        objects[index] = data[position : position + length]
        position += -(-length // 8) * 8
    return objects


def read_labels(fs: FileSystem, file_name: str, file: Any, key: str, count: int) -> np.ndarray:
    """Return the labels as they are stored; names as bytes."""
    import h5py

    location = fs.display_path(file_name)
    labels = _checked_dataset(file, location, key, fs.size(file_name))
    check_label_shape(labels.shape, key, location, count)
    check_fits_memory(labels.nbytes, f"{location}: {key} {list(labels.shape)}", "store one class an image")
    with _reraise_as_usage_error(location):
        if labels.dtype.kind in "iubfS":
            return labels[:]
        if h5py.check_string_dtype(labels.dtype) and labels.ndim == 1 and not labels.chunks:
            return np.array(_read_heap_strings(fs, file_name, labels))
    raise UsageError(
        f"data: {location}: {key} are {labels.dtype}, expected integers or names, one an image. Write "
        f"numbers from 0 on, names as np.array({key}, dtype='S'), or use --data.labels=false"
    )


def _data_offset(images: Any, size: int) -> int | None:
    """Return where the images begin in the file, if they are contiguous and not compressed; else None."""
    start = None if images.chunks or images.compression else images.id.get_offset()
    return start if start is not None and start + images.nbytes <= size else None


def _intact_rows(images: Any, size: int) -> np.ndarray:
    """Return for each row of chunks (along N) whether all of its chunks lie in the file: [rows] bool.

    HDF5 crashes on some chunks that do not.
    """
    rows, *chunks_per_row = (-(-side // chunk) for side, chunk in zip(images.shape, images.chunks))
    num_intact = np.zeros(rows, np.int64)

    def count_chunk(chunk: Any) -> None:
        row = chunk.chunk_offset[0] // images.chunks[0]
        if row < rows and chunk.size > 0 and chunk.byte_offset + chunk.size <= size:
            num_intact[row] += 1
        elif row < rows:
            num_intact[row] = -(2**40)

    images.id.chunk_iter(count_chunk)
    return num_intact == math.prod(chunks_per_row)


@contextmanager
def _reraise_as_usage_error(location: str) -> Iterator[None]:
    try:
        yield
    except _CORRUPTION_ERRORS as error:
        reason = format_error(error)
        raise UsageError(f"data: {location} is not an HDF5 file, or is damaged ({reason}). Write it again") from None
