"""A disk cache of remote data, for all processes of this host and later runs."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
from isal.isal_zlib import crc32

from paragan.core.errors import UsageError

GB_BYTES = 10**9
_MAGIC = 0x70617261_67616E31  # is added to checksums, so that zeros are not a valid entry
_HASH_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], "<u8")
ENTRY_BYTES = 40  # key, offset, size, crc, checksum of these; each uint64


def default_cache_dir() -> str:
    """Return the default folder: $XDG_CACHE_HOME/paragan/data, or ~/.cache/paragan/data."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return str(Path(home) / "paragan" / "data")


class DiskCache:
    """A cache of byte ranges of the files below one address. Safe to use from many threads and processes.

    It has two files that are only appended to, so no file lock is needed and a crash leaves at most an unused tail:
    `data` holds the ranges one after the other, `index` an entry of 40 bytes for each, written in one piece after its
    data. Everything read is checked against its CRC32; a damaged range is dropped and stored again when it is
    downloaded again.

    A full cache stores nothing more and evicts nothing: training visits all images equally often, so any subset is as
    good as any other. A file that was replaced on its server has another key; ranges of the old version take space
    until the folder is deleted. A forked process has to open its own.

    hits, misses : calls of `get` with and without result
    stored       : ranges written
    not_stored   : ranges not written, because the cache is full or after a disk error
    corrupted    : ranges whose checksum was wrong

    Args:
        folder: for the caches of all addresses.
        location: the address, without credentials.
        max_gb: limit of all caches in `folder`, in 1e9 bytes; 0 for half of the space that is free now.

    Raises:
        UsageError: the folder cannot be used.
    """

    def __init__(self, folder: str, location: str, max_gb: float = 0.0):
        self.hits = 0
        self.misses = 0
        self.stored = 0
        self.not_stored = 0
        self.corrupted = 0
        self._ranges: dict[int, tuple[int, int, int]] = {}  # key to offset, size, crc
        self._index_read_bytes = 0
        self._lock = threading.Lock()
        name = re.sub(r"[^a-zA-Z0-9]+", "-", location)[:80].strip("-")
        self.path = Path(folder).expanduser() / f"{name}-{hashlib.sha256(location.encode()).hexdigest()[:12]}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._data = os.open(self.path / "data", flags, 0o600)
            self._index = os.open(self.path / "index", flags, 0o600)
            self._max_bytes = self._capacity_bytes(max_gb)
            self._refresh()
        except OSError as error:
            reason = error.strerror or str(error)
            remedy = 'give a folder on a disk of this host, or "" for none'
            raise UsageError(f"data.remote.cache_dir={folder} cannot be used ({reason}): {remedy}") from None

    def __del__(self):
        for file in (getattr(self, "_data", -1), getattr(self, "_index", -1)):
            if file >= 0:
                os.close(file)

    def __len__(self) -> int:
        return len(self._ranges)

    @staticmethod
    def key(name: str, version: str, total: int, start: int, end: int) -> int:
        """Return the 64-bit key of bytes `start` to `end` of a version of a file of `total` bytes."""
        text = f"{name}\0{version}\0{total}\0{start}\0{end}".encode(errors="surrogateescape")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def get(self, key: int) -> bytes | None:
        """Return a range, or None if it is not stored or is damaged."""
        entry = self._ranges.get(key)
        if entry is None and self._refresh():
            entry = self._ranges.get(key)
        if entry is None:
            self.misses += 1
            return None
        offset, size, crc = entry
        try:
            data = os.pread(self._data, size, offset)
        except OSError:
            data = b""
        if len(data) == size and crc32(data) == crc:
            self.hits += 1
            return data
        self.corrupted += 1
        self.misses += 1
        with self._lock:
            if self._ranges.get(key) == entry:
                del self._ranges[key]
        return None

    def put(self, key: int, data: bytes) -> None:
        """Store a range, unless the cache is full or another process stored it."""
        with self._lock:  # all threads share the file position that an append moves
            self._read_new_entries()
            if key in self._ranges:
                return
            try:
                if os.fstat(self._data).st_size + len(data) > self._max_bytes:
                    raise OSError(errno.ENOSPC, "full")
                _append(self._data, data)
                offset = os.lseek(self._data, 0, os.SEEK_CUR) - len(data)
                _append(self._index, _encode_entry(key, offset, len(data), crc32(data)))
            except OSError:
                self.not_stored += 1
                return
            self.stored += 1
            self._read_new_entries()

    def _capacity_bytes(self, max_gb: float) -> int:
        """Return how large `data` may become."""
        used = os.fstat(self._data).st_size
        used_by_others = sum(file.stat().st_size for file in self.path.parent.glob("*/data")) - used
        free = shutil.disk_usage(self.path).free
        if free < 2**20 and not used:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(max_gb * GB_BYTES) - used_by_others if max_gb else used + free // 2

    def _refresh(self) -> bool:
        """Read the new entries of the index. Returns whether there were any."""
        if os.fstat(self._index).st_size - self._index_read_bytes < ENTRY_BYTES:
            return False
        with self._lock:
            return self._read_new_entries()

    def _read_new_entries(self) -> bool:
        new = b""
        try:
            size = os.fstat(self._index).st_size - self._index_read_bytes
            new = os.pread(self._index, size, self._index_read_bytes) if size >= ENTRY_BYTES else b""
        except OSError:
            pass
        parsed_bytes, entries = parse_index(new)
        self._index_read_bytes += parsed_bytes
        self._ranges.update(entries)
        return bool(entries)


def parse_index(index: bytes) -> tuple[int, dict[int, tuple[int, int, int]]]:
    """Parse index entries; damaged ones are skipped, later ones replace earlier ones of the same key.

    Returns:
        The number of bytes parsed (a partial entry at the end may still be being written), and key -> (offset, size,
        crc).
    """
    position = 0
    entries: dict[int, tuple[int, int, int]] = {}
    while len(index) - position >= ENTRY_BYTES:
        count = (len(index) - position) // ENTRY_BYTES
        rows = np.frombuffer(index, "<u8", count=count * 5, offset=position).reshape(-1, 5)
        is_valid = _checksum(rows[:, :4]) == rows[:, 4]  # [n]
        num_valid = len(rows) if is_valid.all() else int(is_valid.argmin())
        keys, offsets, sizes, crcs = rows[:num_valid, :4].T.tolist()
        entries.update(zip(keys, zip(offsets, sizes, crcs)))
        position += num_valid * ENTRY_BYTES
        if num_valid < len(rows):
            position += 1  # past the first byte of a damaged entry: the next begins within ENTRY_BYTES
            while len(index) - position >= ENTRY_BYTES and not _is_valid_entry(
                index[position : position + ENTRY_BYTES]
            ):
                position += 1
    return position, entries


def _encode_entry(key: int, offset: int, size: int, crc: int) -> bytes:
    row = np.array([[key, offset, size, crc]], "<u8")
    return np.concatenate([row[0], _checksum(row)]).astype("<u8").tobytes()


def _checksum(rows: np.ndarray) -> np.ndarray:  # [n, 4] to [n], uint64
    mixed = (rows ^ (rows >> np.uint64(29))) * _HASH_MULTIPLIERS
    return (mixed ^ (mixed >> np.uint64(32))).sum(axis=1, dtype=np.uint64) + np.uint64(_MAGIC)


def _is_valid_entry(entry: bytes) -> bool:
    row = np.frombuffer(entry, "<u8")
    return bool((_checksum(row[None, :4]) == row[4]).all())


def _append(file: int, data: bytes) -> None:
    written = os.write(file, data)
    if written != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
