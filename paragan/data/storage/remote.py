"""Files behind an address: https://, s3://, whatever fsspec reaches."""

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
from paragan.data.storage.http import PART_BYTES, HttpBackend
from paragan.data.storage.retry import FileStat, PermanentError, StorageBackend, retry

FIRST_CONTACT_RETRY_S = 20.0  # patience with a server that never answered
READ_BLOCK_BYTES = 2**20  # bytes that an open file asks for at once
_FILE_SUFFIXES = (
    *(".npz", ".npy", ".zip", ".h5", ".hdf5", ".tar", ".gz", ".tgz", ".parquet", ".arrow"),
    *(".json", ".jsonl", ".csv", ".txt", ".idx", *IMAGE_FORMATS),
)
T = TypeVar("T")

_SHARD_PATTERN = re.compile(r"\*|\{.*\}")


def open_remote(location: str, remote: RemoteOptions) -> tuple[FileSystem, str]:
    """The folder that an address names, or lies in, and the name of a file in it ("" for the folder itself).

    A name that ends as files of sets do (.tar, .npz, ...), or is a pattern (a*.tar, a{00..17}.tar), is a file.
    """
    http = location.lower().startswith(("http://", "https://"))
    address, _, query = location.partition("#")[0].partition("?") if http else (location, "", "")
    folder, _, last = address.rpartition("/")
    name = unquote(last, errors="surrogateescape") if http else last
    if not folder.endswith("/") and (
        _SHARD_PATTERN.search(name) or posixpath.splitext(name)[1].lower() in _FILE_SUFFIXES
    ):
        return RemoteFileSystem(folder, remote, query), name
    return RemoteFileSystem(address, remote, query), ""


class RemoteFileSystem:
    """A folder of a server. What was read comes from `cache` afterwards, if there is one.

    A file stays what it was when it was first met: where an answer is of another version, `DecodeError` is raised if it
    is read whole, and `Failed` if ranges of it are, which would not fit together.

    base : its address;  query : what stands behind each address there, such as a signature
    """

    is_remote = True

    def __init__(self, base_url: str, options: RemoteOptions, query: str = ""):
        self.base_url, self.options = base_url.rstrip("/") if not base_url.endswith("://") else base_url, options
        self.location = redact(printable(self.base_url))
        self.file_stats: dict[str, FileStat] = {}  # by name, as far as asked
        self._first_stats: dict[str, FileStat] = {}  # by name, of what was fetched: when it was first met
        http = base_url.lower().startswith(("http://", "https://"))
        try:
            self.backend: StorageBackend = (
                HttpBackend(self.base_url, query) if http else FsspecBackend(self.base_url, options.timeout_s)
            )
        except PermanentError as error:
            raise UsageError(redact(f"data: {self.location}: {error}")) from None
        self._has_answered = False
        self.cache = (
            DiskCache(options.resolved_cache_dir, self.location, options.cache_gb)
            if options.resolved_cache_dir
            else None
        )

    def display_path(self, name: str) -> str:
        return f"{self.location}/{printable(name)}"

    def list_dir(self, folder: str = "") -> DirListing:
        at = self.display_path(folder) if folder else self.location
        try:
            entries, facts = self._request(lambda s: self.backend.list_dir(folder, s), at)
        except DecodeError as error:
            raise UsageError(f"data: {at} is {error}: check the address") from None
        self.file_stats.update({f"{folder}/{name}" if folder else name: told for name, told in facts.items()})
        return entries

    def size(self, name: str) -> int:
        size = self._stat(name).size
        if size is None:
            raise UsageError(
                f"data: {self.display_path(name)}: the server does not tell how long it is: copy it here first"
            )
        return size

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        if size == 0:
            return b""
        told = FileStat(None) if self.cache is None else self._stat(name)
        if self.cache is None or told.size is None:
            return self._fetch(name, start, size)
        end = told.size if size is None else start + size
        if end > told.size:
            raise _truncated_error(told.size, end)
        key = self.cache.key(name, told.version, told.size, start, end)
        data = self.cache.get(key)
        if data is None:
            data = self._fetch(name, start, end - start, entire_file=size is None)
            self.cache.put(key, data)
        return data

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_RemoteFile(self, name)))

    def _request(self, request: Callable[[float], T], location: str) -> T:
        """Asked with patience once the server has answered at all: until then it may be a wrong address."""
        known = (
            self.options
            if self._has_answered
            else replace(self.options, retry_for_s=min(FIRST_CONTACT_RETRY_S, self.options.retry_for_s))
        )
        answer = retry(request, location, known)
        self._has_answered = True
        return answer

    def _stat(self, name: str) -> FileStat:
        if name not in self.file_stats:
            self.file_stats[name] = self._request(lambda s: self.backend.stat(name, s), self.display_path(name))
        return self.file_stats[name]

    def _fetch(self, name: str, start: int, size: int | None, entire_file: bool = False) -> bytes:
        """From the server, in parts that can come in time, all of the version that was first met."""
        parts, entire_file = list[bytes](), entire_file or size is None
        if size is None:
            if start:
                return self._fetch(name, start, self.size(name) - start, entire_file)
            first = self._request(lambda s: self.backend.fetch(name, 0, None, s), self.display_path(name))
            self._check_version(name, first.stat, entire_file)
            parts = [first.data]
            total = first.stat.size if first.stat.size is not None else len(first.data)
            if len(first.data) == PART_BYTES and first.stat.size is None:
                total = self.size(name)
            start, size = len(first.data), total - len(first.data)
        for begin in range(start, start + size, PART_BYTES):
            end = min(begin + PART_BYTES, start + size)
            answer = self._request(lambda s, b=begin, e=end: self.backend.fetch(name, b, e, s), self.display_path(name))
            self._check_version(name, answer.stat, entire_file)
            if len(answer.data) != end - begin:
                raise _truncated_error(
                    begin + len(answer.data) if answer.stat.size is None else answer.stat.size, start + size
                )
            parts.append(answer.data)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def _check_version(self, name: str, stat: FileStat, entire_file: bool) -> None:
        """Raise where an answer is of another version of a file than the first."""
        first = self._first_stats.setdefault(name, self.file_stats.get(name, stat))
        for was, new in ((first.version or None, stat.version or None), (first.size, stat.size)):
            if None not in (was, new) and was != new:
                what = f"was replaced on its server while it was used (version or size was {was}, now {new})"
                raise DecodeError(what) if entire_file else RunError(redact(f"data: {self.display_path(name)} {what}"))
        if (not first.version and stat.version) or (first.size is None and stat.size is not None):
            self._first_stats[name] = FileStat(
                stat.size if first.size is None else first.size, first.version or stat.version
            )


def _truncated_error(available: int, requested: int) -> DecodeError:
    return DecodeError(f"ends after {available:,} bytes, {requested:,} were expected")


class _RemoteFile(io.RawIOBase):
    """A file of a place, read in blocks, of which some are kept."""

    def __init__(self, fs: RemoteFileSystem, name: str):
        self._size, self._position = fs.size(name), 0

        def fetch(start: int, end: int) -> bytes:
            return fs.read(name, start, min(end, self._size) - start)

        self._block_cache = BlockCache(READ_BLOCK_BYTES, fetch, self._size)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self._block_cache._fetch(self._position, min(self._position + len(buffer), self._size))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
