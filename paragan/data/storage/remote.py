"""Files behind an address: https://, object stores, and other protocols of fsspec.

Versions of a file are never mixed: a file keeps the version (ETag or date, and size) that was read first. A response of
another version raises an error that names the file.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO, TypeVar, cast
from urllib.parse import unquote

from fsspec.caching import BlockCache

from paragan.core.errors import RunError, UsageError
from paragan.data.source import IMAGE_FORMATS, DecodeError
from paragan.data.storage.disk_cache import DiskCache
from paragan.data.storage.filesystem import DirListing, FileSystem, RemoteOptions, printable, redact
from paragan.data.storage.fsspec_backend import FsspecBackend
from paragan.data.storage.http import HttpBackend
from paragan.data.storage.local import truncated_error
from paragan.data.storage.object_store import SCHEMES, ObjectStore
from paragan.data.storage.range_reader import RangeReader
from paragan.data.storage.retry import PART_BYTES, FileStat, PermanentError, StorageBackend, retry

FIRST_CONTACT_RETRY_S = 20.0  # for a server that has never answered: its address may be wrong
READ_BLOCK_BYTES = 2**20  # of an open file, per request
_FILE_SUFFIXES = (
    *(".npz", ".npy", ".zip", ".h5", ".hdf5", ".tar", ".gz", ".tgz", ".parquet", ".arrow"),
    *(".json", ".jsonl", ".csv", ".txt", ".idx", *IMAGE_FORMATS),
)
T = TypeVar("T")

_SHARD_PATTERN = re.compile(r"\*|\{.*\}")


def open_remote(location: str, remote: RemoteOptions) -> tuple[FileSystem, str]:
    """Open the folder that an address names, or the folder of the file that it names.

    A name that ends like a data file (.tar, .npz, ...) or is a pattern (a*.tar, a{00..17}.tar) is a file.

    Returns:
        The folder, and the name of the file in it ("" if the address is the folder itself).

    Raises:
        UsageError: the address cannot be used.
    """
    is_http = _is_http(location)
    address, _, query = location.partition("#")[0].partition("?") if is_http else (location, "", "")
    folder, _, last = address.rpartition("/")
    name = unquote(last, errors="surrogateescape") if is_http else last
    is_file = _SHARD_PATTERN.search(name) or posixpath.splitext(name)[1].lower() in _FILE_SUFFIXES
    if is_file and not folder.endswith("/"):
        return RemoteFileSystem(folder, remote, query), name
    return RemoteFileSystem(address, remote, query), ""


def _is_http(location: str) -> bool:
    return location.lower().startswith(("http://", "https://"))


def _make_backend(base_url: str, query: str, timeout_s: float) -> StorageBackend:
    if _is_http(base_url):
        return HttpBackend(base_url, query, timeout_s)
    if base_url.partition("://")[0].lower() in SCHEMES:
        return ObjectStore(base_url, timeout_s)
    return FsspecBackend(base_url)


class RemoteFileSystem:
    """A `FileSystem` over a folder of a server, with a cache on disk.

    A response of another version than the first raises `DecodeError` if the whole file is read, and `RunError` if
    ranges of it are read, since ranges of two versions do not fit together.

    Args:
        base_url: address of the folder.
        options: timeouts and cache.
        query: is appended to every address, such as a signature.
    """

    is_remote = True
    local_root = None

    def __init__(self, base_url: str, options: RemoteOptions, query: str = ""):
        self.base_url = base_url if base_url.endswith("://") else base_url.rstrip("/")
        self.options = options
        self.location = redact(printable(self.base_url))
        self.file_stats: dict[str, FileStat] = {}  # by name: from listings and `stat`
        self._first_stats: dict[str, FileStat] = {}  # by name: of the first response with data
        try:
            self.backend = _make_backend(self.base_url, query, options.timeout_s)
        except PermanentError as error:
            raise UsageError(redact(f"data: {self.location}: {error}")) from None
        self._has_answered = False
        self.cache: DiskCache | None = None
        if options.resolved_cache_dir:
            self.cache = DiskCache(options.resolved_cache_dir, self.location, options.cache_gb)

    def display_path(self, name: str) -> str:
        """Return the address of a file as messages show it."""
        return f"{self.location}/{printable(name)}"

    def list_dir(self, folder: str = "") -> DirListing:
        """List the files and folders directly in `folder`, sorted by name.

        Raises:
            UsageError: there is no such folder, or the server does not list it.
        """
        address = self.display_path(folder) if folder else self.location
        try:
            listing, stats = self._request(lambda timeout_s: self.backend.list_dir(folder, timeout_s), address)
        except DecodeError as error:
            raise UsageError(f"data: {address} is {error}: check the address") from None
        self.file_stats.update({f"{folder}/{name}" if folder else name: stat for name, stat in stats.items()})
        return listing

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            UsageError: the server does not tell it.
        """
        size = self._stat(name).size
        if size is None:
            raise UsageError(
                f"data: {self.display_path(name)}: the server does not tell its size: copy it to this machine first"
            )
        return size

    def version(self, name: str) -> str:
        """Return the version (ETag or date) of a file, "" if the server tells none."""
        version = self._stat(name).version
        return f"server {version}" if version else ""

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Read exactly `size` bytes from `start` on, from the cache if they are there; None reads to the end."""
        if size == 0:
            return b""
        if self.cache is None:
            return self._fetch(name, start, size)
        stat = self._stat(name)
        if stat.size is None or not stat.version:  # a file that is replaced could not be told from the former one
            return self._fetch(name, start, size)
        end = stat.size if size is None else start + size
        if end > stat.size:
            raise truncated_error(stat.size, end)
        key = self.cache.key(name, stat.version, stat.size, start, end)
        data = self.cache.get(key)
        if data is None:
            data = self._fetch(name, start, end - start, entire_file=size is None)
            self.cache.put(key, data)
        return data

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading, seekable, in blocks of READ_BLOCK_BYTES."""
        size = self.size(name)
        blocks = BlockCache(READ_BLOCK_BYTES, lambda start, end: self.read(name, start, min(end, size) - start), size)
        return cast(BinaryIO, io.BufferedReader(RangeReader(size, blocks._fetch)))

    def _request(self, request: Callable[[float], T], location: str) -> T:
        """Send a request with retries; shorter ones until the server has answered once."""
        options = self.options
        if not self._has_answered:
            options = replace(options, retry_for_s=min(FIRST_CONTACT_RETRY_S, options.retry_for_s))
        response = retry(request, location, options)
        self._has_answered = True
        return response

    def _stat(self, name: str) -> FileStat:
        if name not in self.file_stats:
            self.file_stats[name] = self._request(
                lambda timeout_s: self.backend.stat(name, timeout_s), self.display_path(name)
            )
        return self.file_stats[name]

    def _fetch(self, name: str, start: int, size: int | None, entire_file: bool = False) -> bytes:
        """Download a range, in parts that fit into one timeout, all of the same version."""
        parts: list[bytes] = []
        entire_file = entire_file or size is None
        if size is None:
            if start:
                return self._fetch(name, start, self.size(name) - start, entire_file)
            first = self._request(
                lambda timeout_s: self.backend.fetch(name, 0, None, timeout_s), self.display_path(name)
            )
            self._check_version(name, first.stat, entire_file)
            parts = [first.data]
            total = first.stat.size if first.stat.size is not None else len(first.data)
            if len(first.data) == PART_BYTES and first.stat.size is None:
                total = self.size(name)
            start = len(first.data)
            size = total - len(first.data)
        for part_start in range(start, start + size, PART_BYTES):
            part_end = min(part_start + PART_BYTES, start + size)
            response = self._request(
                lambda timeout_s, start=part_start, end=part_end: self.backend.fetch(name, start, end, timeout_s),
                self.display_path(name),
            )
            self._check_version(name, response.stat, entire_file)
            if len(response.data) != part_end - part_start:
                available = response.stat.size
                if available is None:
                    available = part_start + len(response.data)
                raise truncated_error(available, start + size)
            parts.append(response.data)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _check_version(self, name: str, stat: FileStat, entire_file: bool) -> None:
        """Raise if a response is of another version of a file than the first one."""
        first = self._first_stats.setdefault(name, self.file_stats.get(name, stat))
        for old, new in ((first.version or None, stat.version or None), (first.size, stat.size)):
            if None not in (old, new) and old != new:
                message = f"was replaced on its server while it was used (version or size was {old}, now {new})"
                if entire_file:
                    raise DecodeError(message)
                raise RunError(redact(f"data: {self.display_path(name)} {message}"))
        if (not first.version and stat.version) or (first.size is None and stat.size is not None):
            self._first_stats[name] = FileStat(
                stat.size if first.size is None else first.size, first.version or stat.version
            )
