"""WebDataset shards: images in tars, read one by one through an index."""

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
from paragan.data.formats.dataset_json import default_class_names
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import read_span
from paragan.data.formats.tar_index import NO_LABEL, TarIndex, build_index, from_bytes, read_classes_json
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import ByteRange, DirListing, FileSystem, RemoteOptions, printable
from paragan.data.storage.local import LocalFileSystem

INDEX_FILE = "paragan-index.npz"
LogFn = Callable[[str], None]

_NUMBER_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
_MAX_SHARDS = 100_000  # shards
_STAT_THREADS = 16  # far shards whose size is asked for


class TarShardSource:
    """Images in tar shards. Their checksums are those of the index, and checked."""

    array = None

    def __init__(
        self,
        fs: FileSystem,
        index: TarIndex,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.fs, self.index, self.location, self.is_local = fs, index, fs.location, not fs.is_remote
        self.labels, self.classes, self.notes = labels, classes, notes
        columns: tuple[Any, ...] = (index.shard, index.start, index.size, index.crc32)
        self._columns = tuple(map(memoryview, columns))  # which are read faster than arrays

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        shard, start, size, checksum = self._columns
        return read_span(self.fs, self.index.shards[shard[index]], start[index], size[index], checksum[index])

    def byte_ranges(self, index: np.ndarray) -> list[ByteRange]:
        about = self.index
        columns = (column[index].tolist() for column in (about.shard, about.start, about.size, about.crc32))
        return [(about.shards[shard], *lies) for shard, *lies in zip(*columns)]

    def sample_name(self, index: int) -> str:
        return _sample_name(self.fs, self.index, index)

    def fingerprint_parts(self) -> Iterable[bytes]:
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
    """The images in the shards of `place` that `pattern` names: a.tar, shard-*.tar, shard-{000..012}.tar; or `names`.

    Their index is `INDEX` beside them where it is about them as they are. Otherwise they are read once to make it, and
    it is kept there, or in the cache of `reach` if they lie far away, if that can be written.
    """
    sizes = _stat_shards(fs, names) if names else shard_sizes(fs, pattern)
    index, note = _load_or_build_index(fs, sizes, remote or RemoteOptions(), log)
    notes = (f"{len(sizes):,} shard{'s' * (len(sizes) != 1)}; {note}",)
    if not labels or (index.label == NO_LABEL).all():
        return TarShardSource(fs, index, None, (), notes)
    bare = np.flatnonzero(index.label == NO_LABEL)
    if len(bare):
        raise UsageError(
            f"data: {len(bare):,} of {len(index):,} images have no class ({_sample_name(fs, index, int(bare[0]))}): "
            f"add a .cls with a number to each"
        )
    classes = read_classes_json(fs) or index.classes
    check_labels(index.label, fs.location, len(classes) or None)
    return TarShardSource(fs, index, index.label, classes or default_class_names(index.label), notes)


def open_from_index(
    fs: FileSystem, remote: RemoteOptions | None = None, *, labels: bool = True
) -> TarShardSource | None:
    """The shards that the index in a folder names, where the folder itself cannot be listed; None if there is none."""
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
    """Whether it names shards by `*` or {first..last}."""
    return "*" in name or _NUMBER_RANGE.search(name) is not None


def list_shards(listing: DirListing) -> list[str]:
    """The tars of a folder."""
    return [name for name in listing.files if name.endswith(".tar")]


def expand_pattern(pattern: str) -> Iterator[str]:
    """The names that {first..last} stands for; zeros in front of the first are kept."""
    match = _NUMBER_RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    first, last = match[1], match[2]
    if not 0 <= int(last) - int(first) < _MAX_SHARDS:
        raise UsageError(
            f"data: {printable(match[0])} is no range of 1 to {_MAX_SHARDS:,}: give one such as {{000..012}}"
        )
    width = len(first) if first.startswith("0") else 0
    for number in range(int(first), int(last) + 1):
        for rest in expand_pattern(pattern[match.end() :]):
            yield f"{pattern[: match.start()]}{number:0{width}d}{rest}"


def shard_sizes(fs: FileSystem, pattern: str) -> dict[str, int]:
    """The shards that a pattern names, with their bytes."""
    itself = isinstance(fs, LocalFileSystem) and (fs.root / pattern).is_file()  # a file that is called so
    names, sizes = [pattern] if itself else list(expand_pattern(pattern)), {}
    if "*" in pattern and not itself:
        wanted = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in names))
        files = fs.list_dir().files
        sizes = {name: files[name] for name in files if wanted.fullmatch(name)}
        names = list(sizes)
        if not names:
            raise UsageError(
                f"data: {fs.location} holds no {printable(pattern)}: give the names that lie there, by * if many"
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
    """The index of the shards, and where it is from."""
    names, lengths = list(sizes), list(sizes.values())
    kept = _index_path(fs, sizes, remote)
    for data, where in _stored_indexes(fs, kept):
        with contextlib.suppress(UsageError):  # damaged: as if there was none
            if found := from_bytes(data, where).select(names, lengths):
                return found, f"index of {where}"
    made = build_index(fs, names, lengths, log)
    if kept is None:
        return made, "their index is made anew each time; --data.remote.cache_dir=FOLDER would keep it"
    try:
        with atomic_output(kept) as path:
            path.write_bytes(made.to_bytes())
    except (UsageError, OSError):
        return made, f"their index cannot be kept as {printable(kept)}, and is made anew each time"
    return made, f"index kept as {printable(kept)}"


def _stored_indexes(fs: FileSystem, path: Path | None) -> Iterator[tuple[bytes, str]]:
    """What may be their index: the file beside them, or the one that was kept."""
    with contextlib.suppress(DecodeError, OSError):
        yield fs.read(INDEX_FILE), fs.display_path(INDEX_FILE)
    if path is not None and fs.is_remote:
        with contextlib.suppress(OSError):
            yield path.read_bytes(), printable(path)


def _index_path(fs: FileSystem, sizes: dict[str, int], remote: RemoteOptions) -> Path | None:
    """The file that keeps an index which had to be made."""
    if not fs.is_remote:
        return fs.root / INDEX_FILE if isinstance(fs, LocalFileSystem) else None
    about = hashlib.sha256(repr((fs.location, list(sizes.items()))).encode(errors="surrogateescape")).hexdigest()[:32]
    return (
        Path(remote.resolved_cache_dir).expanduser() / "indexes" / f"{about}.npz" if remote.resolved_cache_dir else None
    )
