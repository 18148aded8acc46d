"""The index of tar shards: where each image lies, so that it can be read alone. Built once, stored as a small npz."""

from __future__ import annotations

import io
import math
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from isal.isal_zlib import crc32

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import to_nfc
from paragan.data.formats.label_files import DATASET_JSON, is_label_table, resembles_labels, splits_message
from paragan.data.formats.sample_label import (
    Label,
    is_certain_label,
    is_label_suffix,
    names_of_texts,
    number_labels,
    orphan_labels_message,
    parse_sample_label,
    parse_sample_text,
    unreadable_label_message,
)
from paragan.data.formats.tar_reader import SequentialReader, TarMember, iter_members
from paragan.data.source import IMAGE_FORMATS, DecodeError, NoImagesError
from paragan.data.storage.filesystem import FileSystem, abbreviate, format_error, is_litter, printable

NO_LABEL = -(2**63)  # the label of an image without label

_MAX_LABEL_BYTES = 2**20  # larger members are not labels; of one that only labels have, the first bytes are refused
_MAX_KEY_BYTES = 255
_DTYPE_KINDS = {
    "shards": "U",
    "sizes": "i",
    "versions": "U",
    "num_others": "i",
    "problem": "U",
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
    """The images of tar shards, in their order.

    shards  : [S] names
    sizes   : [S] int64, bytes of each shard
    versions : [S] `FileSystem.version` of each shard; a changed shard is noticed by these two
    num_others : [S] int64, files of each shard that are not images of samples: labels, and what is ignored
    shard   : [N] int32, index of the shard of an image
    start   : [N] int64, first byte of the image in its shard
    size    : [N] int64, in bytes
    label   : [N] int64, NO_LABEL without label
    crc32   : [N] uint32, of the bytes of the image
    keys    : [N] fixed-width bytes, names of the samples
    label_names : [K] what `label` counts where labels are names; () where they are numbers
    problem : why there are no labels although something looks like them; "" if there is no such thing
    """

    shards: tuple[str, ...]
    sizes: np.ndarray
    versions: tuple[str, ...]
    num_others: np.ndarray
    shard: np.ndarray
    start: np.ndarray
    size: np.ndarray
    label: np.ndarray
    crc32: np.ndarray
    keys: np.ndarray
    label_names: tuple[str, ...] = ()
    problem: str = ""

    def __len__(self) -> int:
        return len(self.shard)

    def select(self, shards: Sequence[str], sizes: Sequence[int]) -> TarIndex | None:
        """Return the index of these shards, in this order; None if one of them is unknown or has another size."""
        numbers = {name: number for number, name in enumerate(self.shards)}
        for name, size in zip(shards, sizes):
            if name not in numbers or self.sizes[numbers[name]] != size:
                return None
        rows_of_shards = [numbers[name] for name in shards]
        new_number = np.full(len(self.shards), -1, np.int32)  # [S]
        new_number[rows_of_shards] = np.arange(len(shards))
        shard = new_number[self.shard]  # [N]
        rows = np.argsort(shard, kind="stable")
        rows = rows[shard[rows] >= 0]
        columns = {key: getattr(self, key)[rows] for key in ("start", "size", "label", "crc32", "keys")}
        return replace(
            self,
            shards=tuple(shards),
            sizes=np.array(sizes, np.int64),
            versions=tuple(self.versions[number] for number in rows_of_shards),
            num_others=self.num_others[rows_of_shards],
            shard=shard[rows],
            **columns,
        )

    def to_bytes(self) -> bytes:
        """Return the index as an .npz without pickled objects."""
        columns = {key: np.asarray(getattr(self, key)) for key, kind in _DTYPE_KINDS.items() if kind != "U"}
        names = {key: np.array(getattr(self, key), str) for key in ("shards", "versions", "label_names")}
        names["problem"] = np.array([self.problem])
        file = io.BytesIO()
        np.savez(file, **names, **columns)  # pyright: ignore[reportArgumentType]
        return file.getvalue()


def from_bytes(data: bytes, location: str) -> TarIndex:
    """Parse an index, which messages call `location`.

    Raises:
        UsageError: it is damaged, or describes impossible shards.
    """
    try:
        with warnings.catch_warnings(), zipfile.ZipFile(io.BytesIO(data)) as archive:
            warnings.simplefilter("ignore")
            arrays = {key: _read_array(archive, key, kind) for key, kind in _DTYPE_KINDS.items()}
            arrays["label_names"] = _read_array(archive, "label_names", "U")
        return _validate(arrays)
    except _CORRUPTION_ERRORS as error:
        raise UsageError(
            f"data: {location} is not an index, or is damaged ({format_error(error)}): delete it"
        ) from None


def build_index(
    fs: FileSystem, shards: Sequence[str], sizes: Sequence[int], log: Callable[[str], None] | None = None
) -> TarIndex:
    """Read every shard once and return where its images lie.

    As in WebDataset, files with the same name up to the first dot are one sample: an image (.jpg, .png, .webp, .bmp)
    and its label (sample_label.py). A label that does not stand beside its image is found by its name.

    Args:
        fs: the folder of the shards.
        shards: [S] names.
        sizes: [S] in bytes.
        log: is called with a line for every shard.

    Raises:
        UsageError: a shard is damaged or changes, or there is no image.
    """
    build = _IndexBuilder(fs)
    versions = tuple(fs.version(name) for name in shards)  # before they are read: one may be replaced meanwhile
    num_others: list[int] = []
    for number, (name, size) in enumerate(zip(shards, sizes)):
        first = len(build.samples)
        try:
            num_files = build.read_shard(SequentialReader(fs, name, size), number)
        except DecodeError as error:
            raise UsageError(
                f"data: {fs.display_path(name)} cannot be read: it {error}; is it being written?"
            ) from None
        num_others.append(num_files - len(build.samples) + first)
        if log:
            log(f"{number + 1:,} of {len(shards):,} shards read, {len(build.samples):,} images")
    samples = build.samples
    if not samples:
        raise NoImagesError(
            f"data: {fs.location}: no image in {_abbreviate(shards)}: put {', '.join(IMAGE_FORMATS)} into them"
        )
    numbers, label_names = build.number_labels()
    return TarIndex(
        shards=tuple(shards),
        sizes=np.array(sizes, np.int64),
        versions=versions,
        num_others=np.array(num_others, np.int64),
        shard=np.array([sample.shard for sample in samples], np.int32),
        start=np.array([sample.start for sample in samples], np.int64),
        size=np.array([sample.size for sample in samples], np.int64),
        label=np.array(numbers, np.int64),
        crc32=np.array([sample.crc32 for sample in samples], np.uint32),
        keys=np.array([sample.key.encode("utf8", "surrogateescape")[:_MAX_KEY_BYTES] for sample in samples]),
        label_names=label_names,
        problem=build.problems[0] if build.problems else "",
    )


@dataclass(frozen=True, slots=True)
class _TarSample:
    """One image: a row of the index."""

    key: str
    shard: int
    start: int
    size: int
    crc32: int
    suffix: str


class _IndexBuilder:
    """The samples of shards that were read, with their labels.

    samples  : those that have an image
    labels   : of the samples
    texts    : in the .txt of the samples, as `parse_sample_text` returns them
    orphans  : members that may be labels by key, where there is no image
    tables   : files that look like labels of many images
    table_folders : those that have tables
    problems : what prevents that labels are read
    """

    def __init__(self, fs: FileSystem):
        self.fs = fs
        self.samples: list[_TarSample] = []
        self.labels: list[Label | None] = []
        self.texts: list[str | None] = []
        self.orphans: dict[str, dict[str, bytes]] = {}
        self.tables: list[str] = []
        self.table_folders: set[str] = set()
        self.problems: list[str] = []
        self._known_texts: dict[str, str] = {}

    def read_shard(self, file: SequentialReader, shard: int) -> int:
        """Read one shard and return the number of its files, without hidden ones."""
        key: str | None = None
        images: dict[str, tuple[TarMember, int]] = {}
        labels: dict[str, bytes] = {}
        num_files = 0
        for member in iter_members(file):
            *folders, base = [part for part in to_nfc(member.name).split("/") if part not in ("", ".")] or [""]
            if is_litter(base) or any(is_litter(part) for part in folders if part != ".."):
                continue
            num_files += 1
            stem, dot, suffix = base.partition(".")
            if not stem or not dot:
                continue
            if base == DATASET_JSON:
                self.problems.append(
                    f"data: {file.fs.display_path(file.name)}: the labels of a {DATASET_JSON} in a tar are not read. "
                    "Use a zip or a folder of the same files, or --data.labels=false"
                )
                continue
            folder = "/".join(folders)
            member_key = f"{folder}/{stem}" if folder else stem
            if member_key != key:
                self._add_sample(file, shard, key, images, labels)
                key = member_key
                images = {}
                labels = {}
            suffix = suffix.lower()
            if f".{suffix.rpartition('.')[2]}" in IMAGE_FORMATS:
                images[suffix] = member, _compute_crc32(file, member)
                continue
            if is_label_table(base):
                self.table_folders.add(folder)
            if resembles_labels(base):
                self.tables.append(f"{file.fs.display_path(file.name)}, {printable(base)}")
            if is_label_suffix(suffix) and (member.size <= _MAX_LABEL_BYTES or is_certain_label(suffix)):
                labels[suffix] = file.read(member.offset, min(member.size, _MAX_LABEL_BYTES + 1))
        self._add_sample(file, shard, key, images, labels)
        return num_files

    def _add_sample(
        self,
        file: SequentialReader,
        shard: int,
        key: str | None,
        images: dict[str, tuple[TarMember, int]],
        labels: dict[str, bytes],
    ) -> None:
        """Add the sample of members with one key, by suffix, if it has an image."""
        if key is None:
            return
        if not images:
            if labels:
                self.orphans.setdefault(key, {}).update(labels)
            return
        candidates = [suffix for suffix in images if "." not in suffix] or list(images)
        if any(_stem_of(suffix) in map(_stem_of, labels) for suffix in images if suffix not in candidates):
            candidates = list(images)  # others have labels of their own: they are no masks or the like
        if len(candidates) > 1:
            raise UsageError(
                f"data: {file.fs.display_path(file.name)}: {printable(key)} has several images "
                f"({abbreviate(candidates)}). Keep one a sample, or let their names differ before the first dot"
            )
        (suffix,) = candidates
        member, checksum = images[suffix]
        sample = _TarSample(key, shard, member.offset, member.size, checksum, suffix)
        self.samples.append(sample)
        self.labels.append(self._parse_label(labels, sample, file.fs.display_path(file.name)))
        self.texts.append(parse_sample_text(labels, sample.suffix, self._known_texts))

    def number_labels(self) -> tuple[list[int], tuple[str, ...]]:
        """Return `TarIndex.label` and `label_names`."""
        self._match_orphans()
        labels = self.labels
        if all(label is None for label in labels) and not self.problems:
            labels = self._labels_of_texts()
        try:
            return number_labels(labels, [sample.key for sample in self.samples], NO_LABEL)
        except UsageError as error:
            self.problems.append(str(error))
            return [NO_LABEL] * len(self.samples), ()

    def _match_orphans(self) -> None:
        """Find labels that do not stand beside their image by its name."""
        for row, sample in enumerate(self.samples):
            if self.labels[row] is None and sample.key in self.orphans:
                members = self.orphans.pop(sample.key)
                self.labels[row] = self._parse_label(members, sample, self.fs.location)
                self.texts[row] = self.texts[row] or parse_sample_text(members, sample.suffix, self._known_texts)
        certain = [key for key, members in self.orphans.items() if any(map(is_certain_label, members))]
        if certain and all(label is None for label in self.labels):
            self.problems.append(orphan_labels_message(certain, self.fs.location))

    def _labels_of_texts(self) -> Sequence[Label | None]:
        """Return the names of classes in .txt members, where neither other members nor folders hold labels."""
        folders = sorted({sample.key.rpartition("/")[0] for sample in self.samples})
        if len(folders) > 1:
            if self.table_folders.issuperset(folders):
                remedy = f"Use a folder of the files in {printable(folders[0])}"
                self.problems.append(splits_message(self.fs.location, folders, remedy))
            return self.labels
        try:
            names = names_of_texts(self.texts)
        except ValueError as error:
            self.problems.append(f"data: {self.fs.location}: {error}")
            return self.labels
        if names is None and self.tables:
            self.problems.append(
                f"data: {self.tables[0]} looks like labels, and tables in a tar are not read. Use a zip or a folder of "
                "the same files, or --data.labels=false"
            )
        return names or self.labels

    def _parse_label(self, members: dict[str, bytes], sample: _TarSample, location: str) -> Label | None:
        """Return the label of a sample. location: of the shard, or of the folder of the shards."""
        try:
            return parse_sample_label(members, sample.suffix)
        except ValueError as error:
            self.problems.append(unreadable_label_message(f"{location}, {printable(sample.key)}", error))
            return None


def _compute_crc32(file: SequentialReader, member: TarMember) -> int:
    checksum = 0
    for chunk in file.iter_chunks(member.offset, member.size):
        checksum = crc32(chunk, checksum)
    return checksum


def _read_array(archive: zipfile.ZipFile, key: str, kind: str) -> np.ndarray:
    """Read one array [n]. Its length must match its bytes: the header alone is not trusted."""
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


def _validate(arrays: dict[str, np.ndarray]) -> TarIndex:
    shards, sizes, shard, start, size = (arrays[key] for key in ("shards", "sizes", "shard", "start", "size"))
    rows = {key: len(arrays[key]) for key in ("shard", "start", "size", "label", "crc32", "keys")}
    versions = arrays["versions"]
    lengths = {len(shards), len(sizes), len(versions), len(arrays["num_others"])}
    if len(set(rows.values())) != 1 or not len(shard) or len(lengths) != 1 or not len(shards):
        raise ValueError(f"its arrays do not fit: {len(shards)} shards, {len(sizes)} sizes, {rows}")
    names = tuple(str(name) for name in shards)
    if len(set(names)) < len(names) or shard.min() < 0 or shard.max() >= len(shards):
        raise ValueError("it names shards that do not exist, or one twice")
    if start.min() < 0 or size.min() < 0 or (size > sizes[shard] - start).any():
        raise ValueError("it places images outside of their shards")
    label, label_names = arrays["label"], arrays["label_names"]
    named = label[label != NO_LABEL]
    if len(label_names) and len(named) and not 0 <= named.min() <= named.max() < len(label_names):
        raise ValueError("it has labels without name")
    return TarIndex(
        shards=names,
        sizes=sizes.astype(np.int64),
        versions=tuple(str(version) for version in versions),
        num_others=arrays["num_others"].astype(np.int64),
        shard=shard.astype(np.int32),
        start=start.astype(np.int64),
        size=size.astype(np.int64),
        label=label.astype(np.int64),
        crc32=arrays["crc32"].astype(np.uint32),
        keys=arrays["keys"],
        label_names=tuple(str(name) for name in label_names),
        problem=str(arrays["problem"][0]),
    )


def _abbreviate(names: Sequence[str]) -> str:
    first = printable(names[0])
    return f"{first} and {len(names) - 1:,} more" if len(names) > 1 else first


def _stem_of(suffix: str) -> str:
    """Return a suffix such as crop.png without its last part."""
    return suffix.rpartition(".")[0]
