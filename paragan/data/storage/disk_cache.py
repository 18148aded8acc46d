"""What came from far away, on a disk of this host, for all its processes and later runs."""

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
_MAGIC = 0x70617261_67616E31  # makes zeros invalid
_HASH_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x27D4EB2F165667C5], "<u8")
ENTRY_BYTES = 40  # bytes: key, offset, size, crc, check, each uint64


def default_cache_dir() -> str:
    """Where a cache lies unless somebody says: $XDG_CACHE_HOME/paragan/data, or ~/.cache/paragan/data."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return str(Path(home) / "paragan" / "data")


class DiskCache:
    """Ranges of the files of one place, kept as they came. Safe to use from many threads and processes.

    Two files, to which is only ever appended, so nothing is locked and a crash leaves at most an unused end: `data`,
    the ranges one after the other; and `index`, an entry of 40 bytes for each, written after it in one piece. Whatever
    is read is checked against its CRC32: what was torn or damaged is dropped, and kept anew when it comes again.

    Once `most_gb` are there (0: half of what is free at opening), nothing more is kept. Nothing is thrown out either:
    images are drawn evenly over epochs, so those that stay are as good as any others. A file that was replaced on its
    server has another key; what was kept of the old one takes room until the folder is deleted.

    hits, misses : of `get`;  kept : ranges written;  unkept : not, as full or for an error of the disk
    damaged      : ranges whose checksum was wrong

    A process that was forked opens its own.
    """

    def __init__(self, folder: str, location: str, max_gb: float = 0.0):
        self.hits = self.misses = self.stored = self.not_stored = self.corrupted = 0
        self._ranges: dict[int, tuple[int, int, int]] = {}  # key to offset, size, crc
        self._index_read_bytes, self._lock = 0, threading.Lock()  # bytes of the index that were read
        name = re.sub(r"[^a-zA-Z0-9]+", "-", location)[:80].strip("-")
        self.path = Path(folder).expanduser() / f"{name}-{hashlib.sha256(location.encode()).hexdigest()[:12]}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._data = os.open(self.path / "data", flags, 0o644)
            self._index = os.open(self.path / "index", flags, 0o644)
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
        """64 bits for a range of a version of a file of `total` bytes."""
        told = f"{name}\0{version}\0{total}\0{start}\0{end}".encode(errors="surrogateescape")
        return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")

    def get(self, key: int) -> bytes | None:
        """A range that is there, and whole."""
        found = self._ranges.get(key)
        if found is None and self._refresh():
            found = self._ranges.get(key)
        if found is None:
            self.misses += 1
            return None
        offset, size, crc = found
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
            if self._ranges.get(key) == found:
                del self._ranges[key]
        return None

    def put(self, key: int, data: bytes) -> None:
        """Keep a range, if there is room and another process did not."""
        with self._lock:  # the place in the file, which an append moves, is the process's
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
        """How long `data` may become, in bytes."""
        here = os.fstat(self._data).st_size
        others = sum(file.stat().st_size for file in self.path.parent.glob("*/data")) - here
        free = shutil.disk_usage(self.path).free
        if free < 2**20 and not here:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return int(max_gb * GB_BYTES) - others if max_gb else here + free // 2

    def _refresh(self) -> bool:
        """Read what was added to the index since; whether there was anything."""
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
        used, found = parse_index(new)
        self._index_read_bytes += used
        self._ranges.update(found)
        return bool(found)


def parse_index(index: bytes) -> tuple[int, dict[int, tuple[int, int, int]]]:
    """Entries, key to offset, size, crc, and the bytes they took. Later ones win; what is torn or damaged is left out.

    The end is left where it may be an entry that is being written.
    """
    at, found = 0, dict[int, tuple[int, int, int]]()
    while len(index) - at >= ENTRY_BYTES:
        rows = np.frombuffer(index, "<u8", count=(len(index) - at) // ENTRY_BYTES * 5, offset=at).reshape(-1, 5)
        good = _checksum(rows[:, :4]) == rows[:, 4]  # [n]
        run = len(rows) if good.all() else int(good.argmin())
        keys, offsets, sizes, crcs = rows[:run, :4].T.tolist()
        found.update(zip(keys, zip(offsets, sizes, crcs)))
        at += run * ENTRY_BYTES
        if run < len(rows):
            at += 1  # past the first byte of a torn one: the next begins within 40
            while len(index) - at >= ENTRY_BYTES and not _is_valid_entry(index[at : at + ENTRY_BYTES]):
                at += 1
    return at, found


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
