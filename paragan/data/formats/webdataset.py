"""WebDataset shards: images in tar files, read one by one through an index (`tar_index`)."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import (
    check_labels,
    labels_from_folders,
    resolve_class_names,
    sort_class_names,
    unknown_class_error,
)
from paragan.data.formats.dataset_json import CLASSES_JSON, parse_class_names
from paragan.data.formats.read_span import read_span
from paragan.data.formats.sample_label import missing_labels_error
from paragan.data.formats.tar_index import NO_LABEL, TarIndex, build_index, from_bytes
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import ByteRange, DirListing, FileSystem, RemoteOptions, printable

INDEX_FILE = "paragan-index.npz"
LogFn = Callable[[str], None]

_NUMBER_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
_MAX_SHARDS = 100_000
_STAT_THREADS = 16


class TarShardSource:
    """The images of tar shards. Each read is verified with the checksum in the index.

    Args:
        fs: the folder of the shards.
        index: where the images lie.
        labels: [N] int64, or None.
        classes: [K] names.
        notes: lines for `describe`.
    """

    array = None

    def __init__(
        self,
        fs: FileSystem,
        index: TarIndex,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.fs = fs
        self.index = index
        self.location = fs.location
        self.is_local = not fs.is_remote
        self.labels = labels
        self.classes = classes
        self.notes = notes
        columns: tuple[Any, ...] = (index.shard, index.start, index.size, index.crc32)
        self._columns = tuple(map(memoryview, columns))  # single values are read faster than from arrays

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        """Return the file of image `index`."""
        shard, start, size, checksum = self._columns
        return read_span(self.fs, self.index.shards[shard[index]], start[index], size[index], checksum[index])

    def byte_ranges(self, index: np.ndarray) -> list[ByteRange]:
        """Return where the images `index` [n] lie."""
        rows = self.index
        columns = (column[index].tolist() for column in (rows.shard, rows.start, rows.size, rows.crc32))
        return [(rows.shards[shard], start, size, checksum) for shard, start, size, checksum in zip(*columns)]

    def sample_name(self, index: int) -> str:
        """Return the path or address of the shard of image `index`, and its name in the shard."""
        return _sample_name(self.fs, self.index, index)

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names, sizes and checksums of all images."""
        yield self.index.keys.tobytes()
        yield self.index.size.astype("<i8").tobytes()
        yield self.index.crc32.astype("<u4").tobytes()


def open_tar_shards(
    fs: FileSystem,
    pattern: str,
    remote: RemoteOptions | None = None,
    *,
    labels: bool = True,
    log: LogFn | None = None,
    names: Sequence[str] = (),
) -> TarShardSource:
    """Open the images of tar shards.

    The index is read from INDEX_FILE in their folder if it fits: names, sizes and versions of the shards are those of
    the index. Otherwise the shards are read once to build it, and it is stored there, or in the cache folder if the
    shards are remote or their folder cannot be written. The index of shards that were uploaded with it has versions of
    another kind: it is used, and a note says so.

    Args:
        fs: the folder of the shards.
        pattern: their names: a.tar, shard-*.tar, shard-{000..012}.tar.
        remote: has the cache folder.
        labels: whether to use the labels.
        log: is called with a line for every shard that is read.
        names: their names, instead of `pattern`.

    Raises:
        UsageError: there are no such shards, one is damaged, or labels do not fit.
    """
    sizes = _stat_shards(fs, names) if names else shard_sizes(fs, pattern)
    index, index_note = _load_or_build_index(fs, sizes, remote or RemoteOptions(), log)
    unit = "shard" if len(sizes) == 1 else "shards"
    num_ignored = int(index.num_others.sum())
    if labels:
        num_ignored -= int((index.label != NO_LABEL).sum())
    notes = (f"{len(sizes):,} {unit}; {index_note}",)
    if num_ignored > 0:
        notes = (*notes, f"ignored other files in the {unit} ({num_ignored:,})")
    if labels and index.problem:
        raise UsageError(index.problem)
    if not labels:
        return TarShardSource(fs, index, None, (), notes)
    if (index.label == NO_LABEL).all():
        names = [bytes(key).decode("utf8", "surrogateescape") for key in index.keys]
        numbers, classes = labels_from_folders(names, fs.location, "use --data.labels=false")
        return TarShardSource(fs, index, numbers, classes, notes if numbers is None else (*notes, "labels of folders"))
    unlabelled = np.flatnonzero(index.label == NO_LABEL)
    if len(unlabelled):
        example = _sample_name(fs, index, int(unlabelled[0]))
        raise missing_labels_error(len(unlabelled), len(index), example)
    numbers, classes = _resolve_labels(fs, index)
    check_labels(numbers, fs.location, len(classes) or None)
    return TarShardSource(fs, index, numbers, resolve_class_names(numbers, classes), notes)


def _resolve_labels(fs: FileSystem, index: TarIndex) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the labels [N] and the names of the classes: those of classes.json, else those that the labels are.

    The index may be older than classes.json, and may be of more shards: only what it says of its images counts.
    """
    classes = _read_classes_json(fs)
    if not index.label_names:
        return index.label, classes
    present = np.unique(index.label)
    names = [index.label_names[number] for number in present]
    number_by_name = {name: number for number, name in enumerate(classes or sort_class_names(names))}
    if unknown := [name for name in names if name not in number_by_name]:
        raise unknown_class_error(unknown[0], fs.location, CLASSES_JSON)
    new_number = np.zeros(len(index.label_names), np.int64)
    new_number[present] = [number_by_name[name] for name in names]
    return new_number[index.label], tuple(number_by_name)


def _read_classes_json(fs: FileSystem) -> tuple[str, ...]:
    """Return the names in the classes.json of a folder; () if it does not exist or cannot be read.

    Raises:
        UsageError: it is not a list of unique names.
    """
    try:
        data = fs.read(CLASSES_JSON)
    except (DecodeError, OSError, UsageError):
        return ()
    return parse_class_names(data, fs.display_path(CLASSES_JSON))


def open_from_index(
    fs: FileSystem, remote: RemoteOptions | None = None, *, labels: bool = True
) -> TarShardSource | None:
    """Open the shards that the index of a folder names, if the folder cannot be listed; None without an index."""
    try:
        index = from_bytes(fs.read(INDEX_FILE), fs.display_path(INDEX_FILE))
    except (DecodeError, UsageError, OSError):
        return None
    if any("/" in name or is_shard_pattern(name) for name in index.shards):
        return None
    return open_tar_shards(fs, "*.tar", remote, labels=labels, names=index.shards)


def _sample_name(fs: FileSystem, index: TarIndex, row: int) -> str:
    key = bytes(index.keys[row]).decode("utf8", "replace")
    return f"{fs.display_path(index.shards[index.shard[row]])}, {printable(key)}"


def is_shard_pattern(name: str) -> bool:
    """Return whether a name is a pattern with `*` or {first..last}."""
    return "*" in name or _NUMBER_RANGE.search(name) is not None


def list_shards(listing: DirListing) -> list[str]:
    """Return the tar files of a folder."""
    return [name for name in listing.files if name.endswith(".tar")]


def expand_pattern(pattern: str) -> Iterator[str]:
    """Yield the names that {first..last} stands for, padded like the first number.

    Raises:
        UsageError: the range is empty or too large.
    """
    match = _NUMBER_RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    first, last = match[1], match[2]
    if not 0 <= int(last) - int(first) < _MAX_SHARDS:
        raise UsageError(
            f"data: {printable(match[0])} is not a range of 1 to {_MAX_SHARDS:,} shards. Give one such as {{000..012}}"
        )
    width = len(first) if first.startswith("0") else 0
    for number in range(int(first), int(last) + 1):
        for rest in expand_pattern(pattern[match.end() :]):
            yield f"{pattern[: match.start()]}{number:0{width}d}{rest}"


def shard_sizes(fs: FileSystem, pattern: str) -> dict[str, int]:
    """Return the shards that a pattern names, and their sizes in bytes.

    Raises:
        UsageError: there are none, or one does not exist.
    """
    is_file = fs.local_root is not None and (fs.local_root / pattern).is_file()  # a file with the pattern as its name
    names = [pattern] if is_file else list(expand_pattern(pattern))
    sizes: dict[str, int | None] = {}
    if "*" in pattern and not is_file:
        regex = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in names))
        files = fs.list_dir().files
        sizes = {name: files[name] for name in files if regex.fullmatch(name)}
        names = list(sizes)
        if not names:
            raise UsageError(
                f"data: {fs.location} holds no {printable(pattern)}. Give the names of its shards, such as *.tar"
            )
    sizes |= _stat_shards(fs, [name for name in names if sizes.get(name) is None])
    return {name: int(sizes[name] or 0) for name in names}


def _stat_shards(fs: FileSystem, names: Sequence[str]) -> dict[str, int]:
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        return dict(zip(names, pool.map(lambda name: _stat_shard(fs, name), names)))


def _stat_shard(fs: FileSystem, name: str) -> int:
    try:
        return fs.size(name)
    except (FileNotFoundError, DecodeError):
        raise UsageError(
            f"data: {fs.display_path(name)} does not exist: name the shards that do, or * for all"
        ) from None


def _load_or_build_index(
    fs: FileSystem, sizes: dict[str, int], remote: RemoteOptions, log: LogFn | None
) -> tuple[TarIndex, str]:
    """Return the index of the shards, and a note about where it comes from."""
    names = list(sizes)
    lengths = list(sizes.values())
    cache_path = _cache_path(fs, sizes, remote)
    for data, location in _stored_indexes(fs, cache_path):
        with contextlib.suppress(UsageError):  # a damaged index is built again
            index = from_bytes(data, location).select(names, lengths)
            if index and (note := _check_versions(fs, index)) is not None:
                return index, f"index of {location}{note}"
    index = build_index(fs, names, lengths, log)
    paths = [fs.local_root / INDEX_FILE] if fs.local_root else []
    paths += [cache_path] if cache_path else []
    for index_path in paths:
        with contextlib.suppress(UsageError, OSError):
            with atomic_output(index_path) as path:
                path.write_bytes(index.to_bytes())
            return index, f"index stored as {printable(index_path)}"
    if not paths:
        return index, "the index is built at every start; --data.remote.cache_dir=FOLDER would store it"
    return index, f"the index cannot be stored as {printable(paths[0])} and is built at every start"


def _check_versions(fs: FileSystem, index: TarIndex) -> str | None:
    """Return a note on an index if its shards are as they were when it was built; None if one was replaced since."""
    known_kinds = True
    for name, version in zip(index.shards, index.versions):
        current = fs.version(name)
        if current == version and version:
            continue
        if not fs.is_remote or (version and current and version.split()[0] == current.split()[0]):
            return None
        known_kinds = False  # built for the files that were uploaded, or the server tells no versions
    return "" if known_kinds else ", taken as it is; if labels changed since, `paragan data index` builds it again"


def _stored_indexes(fs: FileSystem, cache_path: Path | None) -> Iterator[tuple[bytes, str]]:
    """Yield the stored indexes, which may be of other shards: the file in the folder, and the one in the cache."""
    with contextlib.suppress(DecodeError, OSError):
        yield fs.read(INDEX_FILE), fs.display_path(INDEX_FILE)
    if cache_path is not None:
        with contextlib.suppress(OSError):
            yield cache_path.read_bytes(), printable(cache_path)


def _cache_path(fs: FileSystem, sizes: dict[str, int], remote: RemoteOptions) -> Path | None:
    """Return where to store an index that cannot lie beside its shards; None if nowhere."""
    if not remote.resolved_cache_dir:
        return None
    digest = hashlib.sha256(repr((fs.location, list(sizes.items()))).encode(errors="surrogateescape")).hexdigest()[:32]
    return Path(remote.resolved_cache_dir).expanduser() / "indexes" / f"{digest}.npz"
