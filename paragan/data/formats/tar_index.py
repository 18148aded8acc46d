"""Where the images lie in tar shards, so that any one is read by itself: found once, and kept in a small file."""

from __future__ import annotations

import io
import json
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from isal.isal_zlib import crc32

from paragan.core.errors import UsageError
from paragan.data.formats.dataset_json import CLASSES_JSON, parse_class_names
from paragan.data.formats.tar_reader import SequentialReader, TarMember, changed_shard_error, iter_members
from paragan.data.source import IMAGE_FORMATS, DecodeError
from paragan.data.storage.filesystem import FileSystem, format_error, printable

NO_LABEL = -(2**63)  # the label of an image that has none

_LABEL_SUFFIXES = ("cls", "txt", "json")  # kinds of members that may tell the label, the first that does
_MAX_LABEL_BYTES = 2**20  # bytes; larger ones tell no label
_MAX_KEY_BYTES = 255
_DTYPE_KINDS = {
    "shards": "U",
    "sizes": "i",
    "shard": "i",
    "start": "i",
    "size": "i",
    "label": "i",
    "crc32": "u",
    "keys": "S",
}
_CORRUPTION_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, LookupError, OSError),
    *(ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError),
)


@dataclass(frozen=True, eq=False)
class TarIndex:
    """The images of some shards, in their order.

    shards : [S] names;  sizes : [S] int64, bytes of each, by which a changed shard is noticed
    shard  : [N] int32, which of them;  start, size : [N] int64, bytes within it
    label  : [N] int64, `NONE` where an image has none
    crc32  : [N] uint32, of its bytes
    keys   : [N] fixed-width bytes, names of samples
    classes: [K] names, where they are known
    """

    shards: tuple[str, ...]
    sizes: np.ndarray
    shard: np.ndarray
    start: np.ndarray
    size: np.ndarray
    label: np.ndarray
    crc32: np.ndarray
    keys: np.ndarray
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.shard)

    def select(self, shards: Sequence[str], sizes: Sequence[int]) -> TarIndex | None:
        """The part about these shards, in this order; None if it is not about all of them as they are."""
        known = {name: (place, int(size)) for place, (name, size) in enumerate(zip(self.shards, self.sizes))}
        if any(known.get(name, (0, -1))[1] != size for name, size in zip(shards, sizes)):
            return None
        order = np.full(len(self.shards), -1, np.int32)
        order[[known[name][0] for name in shards]] = np.arange(len(shards))
        mine = order[self.shard]
        rows = np.argsort(mine, kind="stable")
        rows = rows[mine[rows] >= 0]
        parts = {key: getattr(self, key)[rows] for key in ("start", "size", "label", "crc32", "keys")}
        return replace(self, shards=tuple(shards), sizes=np.array(sizes, np.int64), shard=mine[rows], **parts)

    def to_bytes(self) -> bytes:
        """As an .npz, without any pickle."""
        parts = {key: np.asarray(getattr(self, key)) for key in _DTYPE_KINDS if key != "shards"}
        names = {"shards": np.array(self.shards, str), "classes": np.array(self.classes, str)}
        file = io.BytesIO()
        np.savez(file, **names, **parts)  # pyright: ignore[reportArgumentType]
        return file.getvalue()


def from_bytes(data: bytes, location: str) -> TarIndex:
    """Read an index, which messages call `where`. Raises `Unusable` for one that is damaged or impossible."""
    try:
        with warnings.catch_warnings(), zipfile.ZipFile(io.BytesIO(data)) as archive:
            warnings.simplefilter("ignore")
            parts = {key: _read_array(archive, key, kind) for key, kind in {**_DTYPE_KINDS, "classes": "U"}.items()}
        return _validate(parts)
    except _CORRUPTION_ERRORS as error:
        raise UsageError(f"data: {location} is no index, or a damaged one ({format_error(error)}): delete it") from None


def build_index(
    fs: FileSystem, shards: Sequence[str], sizes: Sequence[int], log: Callable[[str], None] | None = None
) -> TarIndex:
    """Read every shard once, from front to end, and note where its images lie.

    Files belong together if their names are the same up to the first dot, as webdataset has it: an image (.jpg, .png,
    .webp, .bmp) and what tells its class, .cls or .txt with a number, or .json with a "label".
    """
    found: list[_TarSample] = []
    for number, (name, size) in enumerate(zip(shards, sizes)):
        file = SequentialReader(fs, name, size)
        try:
            found += _read_samples(file, number)
        except DecodeError as error:
            raise changed_shard_error(file, error) from None
        if log:
            log(f"{number + 1:,} of {len(shards):,} shards looked through, {len(found):,} images")
    if not found:
        raise UsageError(
            f"data: {fs.location}: no image in {_abbreviate(shards)}: put {', '.join(IMAGE_FORMATS)} into them"
        )
    keys = [one.key.encode("utf8", "surrogateescape")[:_MAX_KEY_BYTES] for one in found]
    return TarIndex(
        tuple(shards),
        np.array(sizes, np.int64),
        np.array([one.shard for one in found], np.int32),
        np.array([one.start for one in found], np.int64),
        np.array([one.size for one in found], np.int64),
        np.array([one.label for one in found], np.int64),
        np.array([one.crc32 for one in found], np.uint32),
        np.array(keys),
        read_classes_json(fs),
    )


@dataclass(frozen=True, slots=True)
class _TarSample:
    key: str
    shard: int
    start: int
    size: int
    crc32: int
    label: int


def _read_samples(file: SequentialReader, shard: int) -> Iterator[_TarSample]:
    """The samples of one shard that have an image."""
    key, images, texts = None, {}, {}
    for member in iter_members(file):
        folder, _, base = member.name.rpartition("/")
        stem, dot, kind = base.partition(".")
        if not stem or not dot:
            continue  # hidden, or without a kind
        mine = f"{folder}/{stem}" if folder else stem
        if mine != key:
            yield from _finish_sample(file, shard, key, images, texts)
            key, images, texts = mine, {}, {}
        kind = kind.lower()
        if f".{kind.rpartition('.')[2]}" in IMAGE_FORMATS:
            images[kind] = member, _compute_crc32(file, member)
        elif kind in _LABEL_SUFFIXES and member.size <= _MAX_LABEL_BYTES:
            texts[kind] = file.read(member.offset, member.size)
    yield from _finish_sample(file, shard, key, images, texts)


def _finish_sample(
    file: SequentialReader,
    shard: int,
    key: str | None,
    images: dict[str, tuple[TarMember, int]],
    texts: dict[str, bytes],
) -> Iterator[_TarSample]:
    if key is None or not images:
        return
    plain = [kind for kind in images if "." not in kind] or list(images)
    if len(plain) > 1:
        raise UsageError(
            f"data: {file.fs.display_path(file.name)}: {printable(key)} has several images "
            f"({', '.join(printable(kind) for kind in plain[:3])}): keep one a sample"
        )
    member, crc32 = images[plain[0]]
    yield _TarSample(key, shard, member.offset, member.size, crc32, _parse_label(texts, file, key))


def _parse_label(texts: dict[str, bytes], file: SequentialReader, key: str) -> int:
    if "cls" in texts:
        if (label := _parse_int(texts["cls"])) is None:
            text = printable(texts["cls"][:40].decode("utf8", "replace"))
            where = f"{file.fs.display_path(file.name)}, {printable(key)}.cls"
            raise UsageError(f"data: {where}: {text!r} is no class: write a number from 0 on")
        return label
    if "txt" in texts and (label := _parse_int(texts["txt"])) is not None:
        return label
    if "json" in texts:
        try:
            whole = json.loads(texts["json"])
        except (ValueError, RecursionError):
            return NO_LABEL
        label = whole.get("label") if isinstance(whole, dict) else None
        if type(label) is int and abs(label) < 2**63:
            return label
    return NO_LABEL


def _parse_int(data: bytes) -> int | None:
    text = data.strip()
    return int(text) if 0 < len(text) < 19 and text.removeprefix(b"-").isdigit() else None


def _compute_crc32(file: SequentialReader, member: TarMember) -> int:
    found = 0
    for piece in file.iter_chunks(member.offset, member.size):
        found = crc32(piece, found)
    return found


def read_classes_json(fs: FileSystem) -> tuple[str, ...]:
    """The names in the classes.json beside the shards, if there is one that may be read."""
    try:
        data = fs.read(CLASSES_JSON)
    except (DecodeError, OSError, UsageError):
        return ()
    return parse_class_names(data, fs.display_path(CLASSES_JSON))


def _read_array(archive: zipfile.ZipFile, key: str, kind: str) -> np.ndarray:
    """One array [n], its length taken from its bytes, never from what it claims."""
    info = archive.getinfo(f"{key}.npy")
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{key} is compressed")
    file = io.BytesIO(archive.read(info))
    if np.lib.format.read_magic(file) != (1, 0):
        raise ValueError(f"{key} is of an unknown version")
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    data = file.read()
    if dtype.kind != kind or len(shape) != 1 or math.prod(shape) * dtype.itemsize != len(data) or not dtype.itemsize:
        raise ValueError(f"{key} is {dtype} {list(shape)}")
    return np.frombuffer(data, dtype)


def _validate(parts: dict[str, np.ndarray]) -> TarIndex:
    shards, sizes, shard, start, size = (parts[key] for key in ("shards", "sizes", "shard", "start", "size"))
    rows = {key: len(parts[key]) for key in ("shard", "start", "size", "label", "crc32", "keys")}
    if len(set(rows.values())) != 1 or not len(shard) or len(shards) != len(sizes) or not len(shards):
        raise ValueError(f"its parts do not fit: {len(shards)} shards, {len(sizes)} sizes, {rows}")
    names = tuple(str(name) for name in shards)
    if len(set(names)) < len(names) or shard.min() < 0 or shard.max() >= len(shards):
        raise ValueError("it names shards that are not there, or one twice")
    if start.min() < 0 or size.min() < 0 or (size > sizes[shard] - start).any():
        raise ValueError("it places images outside of their shards")
    fields = {key: parts[key].astype(np.int64) for key in ("sizes", "start", "size", "label")}
    classes = tuple(str(name) for name in parts["classes"])
    crc32 = parts["crc32"].astype(np.uint32)
    return TarIndex(
        shards=names, shard=shard.astype(np.int32), crc32=crc32, keys=parts["keys"], classes=classes, **fields
    )


def _abbreviate(names: Sequence[str]) -> str:
    first, *others = map(printable, names)
    return f"{first} and {len(others):,} more" if others else first
