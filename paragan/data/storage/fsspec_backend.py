"""Files of any protocol of fsspec that is neither HTTP nor an object store."""

from __future__ import annotations

import asyncio
import errno
import threading
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from paragan.data.storage.filesystem import DirListing, is_litter
from paragan.data.storage.retry import (
    PART_BYTES,
    FileStat,
    NotFoundError,
    PermanentError,
    Response,
    RetryableError,
    short_response_error,
)
from paragan.data.storage.timeouts import run_in_thread, run_on_loop

_VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "modified", "updated", "created", "blob_id")


class FsspecBackend:
    """A `StorageBackend` for a protocol of fsspec. Requests of protocols that are not asynchronous are sent one by
    one."""

    def __init__(self, base_url: str):
        self.base_url = base_url
        self.protocol = base_url.partition("://")[0].lower()
        self._fsspec_fs: Any = None
        self._root = ""
        self._open_lock = threading.Lock()
        self._request_lock = threading.Lock()
        try:
            fsspec.get_filesystem_class(self.protocol)
        except ValueError:
            raise PermanentError(f"{self.protocol}:// is not known: use http://, https:// or s3://") from None
        except ImportError:
            hint = known_implementations.get(self.protocol, {}).get("err", "install what it needs")
            raise PermanentError(f"it needs a package: {hint}") from None

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Response:
        """Read bytes `start` to `end`; None: the first PART_BYTES."""
        stop = start + PART_BYTES if end is None else end
        size = None
        try:
            data = self._request("cat_file", name, timeout_s, start=start, end=stop)
        except _RangeBeyondEnd:
            data = b""
        if len(data) > stop - start:
            raise PermanentError("it ignores byte ranges and sends whole files: copy them to this machine first")
        if len(data) < stop - start:
            size = self.stat(name, timeout_s).size
        if size is not None and start + len(data) < min(size, stop):
            raise short_response_error(len(data), stop - start)
        return Response(data, FileStat(size))

    def stat(self, name: str, timeout_s: float) -> FileStat:
        """Return the size and version of a file."""
        return _to_file_stat(self._request("info", name, timeout_s))

    def list_dir(self, folder: str, timeout_s: float) -> tuple[DirListing, dict[str, FileStat]]:
        """List a folder, with sizes and versions."""
        entries = self._request("ls", folder, timeout_s, detail=True)
        files: dict[str, FileStat] = {}
        folders = set[str]()
        parent = self._path(folder).strip("/")
        for entry in entries:
            path = str(entry["name"]).strip("/")
            name = path.removeprefix(f"{parent}/") if parent else path
            if path == parent and entry["type"] != "directory" and len(entries) == 1 and entry.get("size"):
                raise PermanentError("this is a file: give its folder, or a file of a supported format")
            if path == parent or "/" in name or is_litter(name):
                continue
            if entry["type"] == "directory":
                folders.add(name)
            else:
                files[name] = _to_file_stat(entry)
        return DirListing({name: files[name].size for name in sorted(files)}, sorted(folders)), files

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/") if name else self._root

    def _connect(self) -> Any:
        """Make the fsspec file system at the first request: some protocols connect, so it may fail and be retried."""
        with self._open_lock:
            if self._fsspec_fs is None:
                self._fsspec_fs, self._root = fsspec.url_to_fs(self.base_url, use_listings_cache=False)
            return self._fsspec_fs

    def _request(self, method: str, name: str, timeout_s: float, **options: Any) -> Any:
        """Call a method of the fsspec file system with a timeout."""
        try:
            fsspec_fs = self._fsspec_fs or run_in_thread(self._connect, timeout_s)
            path = self._path(name)
            if fsspec_fs.async_impl:
                return run_on_loop(getattr(fsspec_fs, f"_{method}")(path, **options), timeout_s)

            def call() -> Any:
                with self._request_lock:
                    return getattr(fsspec_fs, method)(path, **options)

            return run_in_thread(call, timeout_s)
        except (RetryableError, NotFoundError, PermanentError):
            raise
        except Exception as error:
            raise _translate_error(error) from None


class _RangeBeyondEnd(Exception):
    """The range begins at or after the end of the file."""


def _to_file_stat(info: dict[str, Any]) -> FileStat:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    return FileStat(info.get("size"), version)


def _translate_error(error: Exception) -> Exception:
    """Return one of our errors for an exception of fsspec or of a library below it."""
    error_name = type(error).__name__
    text = " ".join(str(error).split())[:200]
    if isinstance(error, FileNotFoundError):
        return NotFoundError("404")
    if isinstance(error, PermissionError):
        return PermanentError(f"it denies access ({text}): check the credentials")
    if isinstance(error, (NotImplementedError, TypeError)):
        return PermanentError(f"it does not support this request ({text}): check the address")
    if isinstance(error, IsADirectoryError):
        return PermanentError("this is a folder: give its address with a / at its end")
    if isinstance(error, OSError) and error.errno == errno.EINVAL and "range" in text.lower():
        return _RangeBeyondEnd()
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return RetryableError("no full response in time")
    return RetryableError(f"{error_name}: {text}")
