"""A labelled set in one HDF5 file, as BigGAN and StudioGAN keep it: `imgs` [N, C, H, W] uint8 and `labels` [N]."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from paragan.core.errors import Unusable
from paragan.data.formats.dataset_json import named
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import LARGEST, Steady, fetch
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import Place, one_line, shown
from paragan.data.storage.local import Here

WANTED = "imgs (uint8 [N, C, H, W] or [N, H, W, C]), labels (integers [N], optional), classes (names [K], optional)"

_KEYS = ("imgs", "images")
_FILTERS = {1, 2, 3, 32000}  # deflate, shuffle, fletcher32, lzf: what h5py itself brings
_RATIO = 1100  # how much smaller than its data a file can be: deflate makes 1,032 bytes of one
_CACHE = 2**26  # bytes of unpacked chunks that HDF5 keeps
_SAMPLE = 16  # images that tell a set from others

# What h5py makes of HDF5's complaints.
_DAMAGE = (OSError, RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, NotImplementedError)


class Hdf5:
    """Images of an HDF5 file, one at a time: h5py is not for many threads, so they wait for each other.

    Not so where images lie in one piece and plain: then their bytes are read without h5py.
    """

    whole = None

    def __init__(
        self,
        steady: Steady,
        place: Place,
        file: str,
        images: Any,
        first: bool,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.place, self.file, self.where, self.near = place, file, place.at(file), not place.remote
        self.steady, self.images, self.first = steady, images, first
        self.labels, self.classes, self.notes = labels, classes, notes
        self.shape = tuple(int(side) for side in images.shape)  # [N, C, H, W] if the channels come `first`
        self.start = _start(images, place.size(file))
        with _reading(self.where):
            self.sound = _sound(images, place.size(file)) if images.chunks else None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, index: int) -> np.ndarray:
        if self.sound is not None and not self.sound[index // self.images.chunks[0]]:
            raise DecodeError("the chunk of the file that holds it is damaged or missing")
        if self.start is None:
            self.steady.check()  # HDF5 itself crashes on some files that were written over
            with self.steady.read(), self._lock:
                try:
                    image = self.images[index]
                except _DAMAGE as error:
                    raise DecodeError(one_line(error)) from None
        else:
            size = math.prod(self.shape[1:])
            with self.steady.read():
                data = fetch(self.place, self.file, self.start + index * size, size)
            image = np.frombuffer(data, np.uint8).reshape(self.shape[1:])
        return np.ascontiguousarray(image.transpose(1, 2, 0)) if self.first else image

    def name(self, index: int) -> str:
        return f"{self.where}, image {index}"

    def identity(self) -> Iterable[bytes]:
        """The format has no checksum of all: shape, size, and the pixels of a few."""
        yield repr((self.shape, self.place.size(self.file))).encode()
        for index in np.unique(np.linspace(0, len(self) - 1, _SAMPLE).astype(int)):
            try:
                yield self.read(int(index)).tobytes()
            except DecodeError as error:
                yield str(error).encode()


def hdf5(place: Place, name: str, *, labels: bool = True) -> Hdf5:
    """The set in the HDF5 file `name`. Nothing that it links to in other files is followed."""
    import h5py  # slow to import, and only needed here

    where, steady, opened = place.at(name), Steady(place, name), place.open(name)
    how: Any = opened
    if isinstance(place, Here) and not place.remote:
        opened.close()  # it may be read: the rest is HDF5's, which is faster with a path
        how = place.path / name
    with _reading(where):
        file = h5py.File(how, "r", rdcc_nbytes=_CACHE, locking=False)
    try:
        key, images = _images(file, where, place.size(name))
        first = len(images.shape) == 4 and images.shape[3] not in (1, 3)
        names = _classes(file, where, place.size(name))
        numbers = _labels(file, where, images.shape[0], place.size(name), len(names) or None) if labels else None
        others = _keys(file, where) - {key, "labels"} - ({"classes"} if names else set())
        notes = [f"ignored keys: {_some(others)}"] * bool(others)
        if images.chunks and images.chunks[0] > 1 and images.compression:
            notes += [f"compressed in chunks of {images.chunks[0]:,} images: each is unpacked for any of them"]
        return Hdf5(steady, place, name, images, first, numbers, named(numbers, names), tuple(notes))
    except Unusable:
        with contextlib.suppress(*_DAMAGE):
            file.close()
        raise


def _keys(file: Any, where: str) -> set[str]:
    with _reading(where):
        return {shown(key) for key in file}


def _some(keys: set[str]) -> str:
    return ", ".join(sorted(keys)[:10])[:300] + ", ..." * (len(keys) > 10) or "nothing"


def _dataset(file: Any, where: str, key: str, size: int) -> Any:
    """A dataset that lies in this file, of which not more is claimed than can be in it."""
    import h5py

    with _reading(where):
        if not isinstance(file.get(key, getlink=True), h5py.HardLink):
            raise Unusable(f"data: {where}: {key} is a link to elsewhere, which is not followed: copy the data into it")
        found = file[key]
        if not isinstance(found, h5py.Dataset):
            raise Unusable(f"data: {where}: {key} is not an array; wanted {WANTED}")
        if found.is_virtual or found.external:
            raise Unusable(f"data: {where}: {key} lies in other files, which are not followed: copy the data into it")
        plan = found.id.get_create_plist()
        filters = [int(plan.get_filter(i)[0]) for i in range(plan.get_nfilters())]
        if not _FILTERS.issuperset(filters):
            known = "gzip or lzf"
            raise Unusable(
                f"data: {where}: {key} is packed by filter {filters[0]}, unknown here: write it with {known}"
            )
        if found.shape is None or found.size * found.dtype.itemsize > _RATIO * size:
            raise Unusable(f"data: {where}: {key} claims to hold more than the file can, it is damaged: write it again")
        if found.chunks and math.prod(found.chunks) * found.dtype.itemsize > LARGEST:
            raise Unusable(
                f"data: {where}: {key} has chunks of more than {LARGEST:,} bytes: write it with smaller ones"
            )
        return found


def _images(file: Any, where: str, size: int) -> tuple[str, Any]:
    keys = _keys(file, where)
    key = next((key for key in _KEYS if key in keys), None)
    if key is None:
        raise Unusable(f"data: {where} has no imgs; found {_some(keys)}; wanted {WANTED}")
    images = _dataset(file, where, key, size)
    shape = list(images.shape)
    if images.dtype != np.uint8:
        raise Unusable(f"data: {where}: {key} are {images.dtype}, wanted uint8 in 0..255: convert and write them again")
    if len(shape) not in (3, 4) or (len(shape) == 4 and not {shape[1], shape[3]} & {1, 3}):
        raise Unusable(f"data: {where}: {key} are {shape}, wanted [N, C, H, W] or [N, H, W, C] with C 1 or 3")
    if 0 in shape:
        raise Unusable(f"data: {where}: {key} are {shape}, no image: give at least one")
    if math.prod(shape[1:]) > LARGEST:
        raise Unusable(f"data: {where}: {key} are {shape}, an image of more than {LARGEST:,} bytes: make them smaller")
    return key, images


def _classes(file: Any, where: str, size: int) -> tuple[str, ...]:
    """The names of classes, if there are such: different strings of fixed width in UTF-8. Anything else is ignored."""
    if "classes" not in _keys(file, where):
        return ()
    found = _dataset(file, where, "classes", size)
    if found.dtype.kind != "S" or len(found.shape) != 1:
        return ()
    with _reading(where):
        names = tuple(shown(name.decode(errors="replace")) for name in found[:].tolist())
    return names if len(set(names)) == len(names) else ()


def _labels(file: Any, where: str, count: int, size: int, classes: int | None) -> np.ndarray | None:
    if "labels" not in _keys(file, where):
        return None
    labels = _dataset(file, where, "labels", size)
    if labels.dtype.kind not in "iu":
        raise Unusable(f"data: {where}: labels are {labels.dtype}, wanted integers: write labels.astype('int64')")
    if labels.shape != (count,):
        raise Unusable(f"data: {where}: labels are {list(labels.shape)}, wanted [{count}], one an image")
    with _reading(where):
        numbers = labels[:]
    check_labels(numbers, where, classes)
    return numbers.astype(np.int64)


def _start(images: Any, size: int) -> int | None:
    """Where the images begin in the file, if they lie there in one piece and plain."""
    start = None if images.chunks or images.compression else images.id.get_offset()
    return start if start is not None and start + images.size <= size else None


def _sound(images: Any, size: int) -> np.ndarray:
    """[rows of chunks] bool: whether all chunks of a row lie in the file. HDF5 itself crashes on some that do not."""
    rows, *across = (-(-side // chunk) for side, chunk in zip(images.shape, images.chunks))
    found = np.zeros(rows, np.int64)

    def look(chunk: Any) -> None:
        row = chunk.chunk_offset[0] // images.chunks[0]
        if row < rows and chunk.size > 0 and chunk.byte_offset + chunk.size <= size:
            found[row] += 1
        elif row < rows:
            found[row] = -(2**40)

    images.id.chunk_iter(look)
    return found == math.prod(across)


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        reason = one_line(error)
        raise Unusable(f"data: {where} is no HDF5 file, or a damaged one ({reason}): write it again") from None
