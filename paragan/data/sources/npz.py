"""A labelled set in one `.npz`, checked array by array before it is read. Nothing in it is ever unpickled."""

import difflib
import math
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paragan.data.decode import ram_bytes
from paragan.errors import Unusable

WANTED = "images (uint8 [N, H, W, C] or [N, H, W]), labels (integers [N], optional), classes (names [K], optional)"

_DAMAGE = (
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError),  # of the archive
    *(
        ValueError,
        TypeError,
        SyntaxError,
        tokenize.TokenError,
    ),  # of an array's header, which is a Python literal
)


@dataclass(frozen=True)
class Stored:
    """What an `.npz` holds."""

    images: np.ndarray  # [N, H, W, C] uint8, C 1 or 3
    labels: np.ndarray | None  # [N] int64
    classes: tuple[str, ...]  # [K] names; () without labels
    ignored: tuple[str, ...]  # other keys


def read_npz(path: Path, name: str, *, labels: bool = True) -> Stored:
    """Read the set in `path`, which messages call `name`; without `labels` theirs are not even looked at.

    Raises `Unusable` for what is not an npz, is damaged, or holds keys, types, shapes or labels that do not
    fit; `OSError` if the file cannot be read.
    """
    with _open(path, name) as archive:
        keys = _keys(archive, name)
        images = _images(archive, name)
        if labels and "classes" in keys and "labels" not in keys:
            raise Unusable(f"data: {name} has classes but no labels: add labels, integers [{len(images)}]")
        if not labels or "labels" not in keys:
            return Stored(images, None, (), _others(keys))
        names = _classes(archive, name) if "classes" in keys else None
        numbers = _labels(archive, name, len(images))
        check_labels(numbers, name, None if names is None else len(names))
        classes = names or tuple(str(label) for label in range(int(numbers.max()) + 1))
        return Stored(images, numbers.astype(np.int64), classes, _others(keys))


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
    if "images" not in keys:
        raise Unusable(f"data: {name} has no images; found {', '.join(keys) or 'nothing'}; wanted {WANTED}")
    for wanted in ("labels", "classes"):
        near = difflib.get_close_matches(wanted, _others(keys), n=1)
        if near and wanted not in keys:
            raise Unusable(f"data: {name} has {near[0]}, which should be called {wanted}; wanted {WANTED}")
    return keys


def _others(keys: list[str]) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in ("images", "labels", "classes"))


def _images(archive: zipfile.ZipFile, name: str) -> np.ndarray:  # [N, H, W, C] uint8
    shape, dtype = _header(archive, name, "images")
    if dtype != np.uint8:
        raise Unusable(f"data: {name}: images are {dtype}, wanted uint8 in 0..255: {_conversion(dtype)}")
    if len(shape) == 4 and shape[3] not in (1, 3) and shape[1] in (1, 3):
        raise Unusable(
            f"data: {name}: images are {list(shape)}, wanted [N, H, W, C]: "
            f"images.transpose(0, 2, 3, 1) moves the channels"
        )
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3)):
        raise Unusable(f"data: {name}: images are {list(shape)}, wanted [N, H, W, C] with C 1 or 3, or [N, H, W]")
    if 0 in shape:
        raise Unusable(f"data: {name}: images are {list(shape)}, no image: give at least one")
    return np.ascontiguousarray(_array(archive, name, "images")).reshape(*shape[:3], -1)


def _labels(archive: zipfile.ZipFile, name: str, count: int) -> np.ndarray:  # [N], integers of any type
    shape, dtype = _header(archive, name, "labels")
    if dtype.kind not in "iu":
        raise Unusable(f"data: {name}: labels are {dtype}, wanted integers: labels.astype(np.int64)")
    if len(shape) != 1:
        remedy = "labels.argmax(1)" if len(shape) == 2 and shape[1] > 1 else "labels.reshape(-1)"
        raise Unusable(f"data: {name}: labels are {list(shape)}, wanted [{count}], one an image: {remedy}")
    if shape[0] != count:
        raise Unusable(f"data: {name}: {shape[0]:,} labels for {count:,} images: give one label an image")
    return _array(archive, name, "labels")


def _classes(archive: zipfile.ZipFile, name: str) -> tuple[str, ...]:
    shape, dtype = _header(archive, name, "classes")
    if dtype.kind != "U" or len(shape) != 1 or not shape[0]:
        raise Unusable(
            f"data: {name}: classes are {dtype} {list(shape)}, wanted one name a class: np.array(names, dtype=str)"
        )
    names = tuple(str(one) for one in _array(archive, name, "classes"))
    twice, count = Counter(names).most_common(1)[0]
    if count > 1:
        raise Unusable(f"data: {name}: {count} classes are called {twice!r}: every class needs its own name")
    return names


def _conversion(dtype: np.dtype) -> str:
    if dtype.kind == "O":
        return "these are pickled objects, which are never loaded; np.stack(images) of equal uint8 arrays"
    if dtype.kind == "f":
        return "(images * 255).round().astype(np.uint8) from [0, 1]; from [-1, 1] the same of (images + 1) / 2"
    if dtype.kind == "b":
        return "images.astype(np.uint8) * 255"
    return "images.astype(np.uint8) if they are in 0..255"


def _header(archive: zipfile.ZipFile, name: str, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and type of an array, without its data; refused if it could not be held."""
    with _reading(name), archive.open(f"{key}.npy") as file:
        version = np.lib.format.read_magic(file)
        parse = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = parse(file)
    need, limit = dtype.itemsize * math.prod(shape), ram_bytes() // 2
    if need > limit:
        raise Unusable(
            f"data: {name}: {key} {list(shape)} need {need / 2**30:,.1f} GiB, more than half of "
            f"this machine's {2 * limit / 2**30:,.1f} GiB of memory: store smaller or fewer images"
        )
    return shape, dtype


def _array(archive: zipfile.ZipFile, name: str, key: str) -> np.ndarray:
    with _reading(name), archive.open(f"{key}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _open(path: Path, name: str) -> zipfile.ZipFile:
    with _reading(name):
        return zipfile.ZipFile(path)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Everything that zipfile and NumPy raise on damaged files, as `Unusable`."""
    try:
        yield
    except _DAMAGE as error:
        reason = " ".join(str(error).split())
        raise Unusable(
            f"data: {name} is not an npz, or a damaged one ({reason}): write it again with "
            f"np.savez(path, images=images, labels=labels)"
        ) from None
