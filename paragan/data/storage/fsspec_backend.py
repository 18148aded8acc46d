"""Files of s3://, and of any other protocol that fsspec knows."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from paragan.data.storage.filesystem import DirListing
from paragan.data.storage.http import PART_BYTES
from paragan.data.storage.retry import FileStat, NotFoundError, PermanentError, Response, RetryableError
from paragan.data.storage.timeouts import run_in_thread, run_on_loop

_VERSION_KEYS = ("ETag", "etag", "LastModified", "mtime", "modified", "updated", "created")
_S3_PROTOCOLS = ("s3", "s3a")
_NEEDS_S3FS = "s3:// needs a package: pip install 'paragan[s3]'"
_CREDENTIALS_HINT = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), or for a public bucket FSSPEC_S3_ANON=true, "
    "and check the bucket's name and AWS_ENDPOINT_URL"
)


class FsspecBackend:
    """A folder by a protocol of fsspec. Those that cannot do two things at once are asked one by one."""

    def __init__(self, base_url: str, timeout_s: float):
        self.base_url, self.protocol = base_url, base_url.partition("://")[0].lower()
        self._fsspec_fs: Any = None
        self._root = ""
        self._open_lock, self._request_lock = threading.Lock(), threading.Lock()
        self._fsspec_options: dict[str, Any] = {"use_listings_cache": False}
        if self.protocol in _S3_PROTOCOLS:  # asking again is ours
            quick = {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": {"max_attempts": 0}}
            self._fsspec_options |= {"config_kwargs": {**quick, "max_pool_connections": 100}}
        try:
            fsspec.get_filesystem_class(self.protocol)
        except ValueError:
            raise PermanentError(f"{self.protocol}:// is not known: use http://, https:// or s3://") from None
        except ImportError:
            hint = known_implementations.get(self.protocol, {}).get("err", "install what it needs")
            raise PermanentError(
                _NEEDS_S3FS if self.protocol in _S3_PROTOCOLS else f"it needs a package: {hint}"
            ) from None

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Response:
        stop, size, version = start + PART_BYTES if end is None else end, None, ""
        try:
            if self.protocol in _S3_PROTOCOLS:
                data, size, version = self._request(_s3_read_range, name, timeout_s, start=start, end=stop)
            else:
                data = self._request("cat_file", name, timeout_s, start=start, end=stop)
        except _RangeBeyondEnd:
            data = b""
        if len(data) > stop - start:
            raise PermanentError("it ignores byte ranges and sends whole files: copy them here first")
        if size is None and len(data) < stop - start:
            size = self.stat(name, timeout_s).size
        if size is not None and start + len(data) < min(size, stop):
            raise RetryableError(f"{len(data):,} bytes came of the {stop - start:,} that were asked for")
        return Response(data, FileStat(size, version))

    def stat(self, name: str, timeout_s: float) -> FileStat:
        return _to_file_stat(self._request("info", name, timeout_s))

    def list_dir(self, folder: str, timeout_s: float) -> tuple[DirListing, dict[str, FileStat]]:
        seen, files, folders = self._request("ls", folder, timeout_s, detail=True), dict[str, FileStat](), set[str]()
        parent = self._path(folder).strip("/")
        for one in seen:
            path = str(one["name"]).strip("/")
            inside = path.removeprefix(f"{parent}/") if parent else path
            if path == parent and one["type"] != "directory" and len(seen) == 1 and one.get("size"):
                raise PermanentError("this is a file: give the folder it lies in, or a file of a format known here")
            if path == parent or "/" in inside or inside.startswith("."):
                continue
            if one["type"] == "directory":
                folders.add(inside)
            else:
                files[inside] = _to_file_stat(one)
        return DirListing({name: files[name].size for name in sorted(files)}, sorted(folders)), files

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/") if name else self._root

    def _connect(self) -> Any:
        """Made when it is needed first: some protocols connect, so this may fail, and is asked again."""
        with self._open_lock:
            if self._fsspec_fs is None:
                files, self._root = fsspec.url_to_fs(self.base_url, **self._fsspec_options)
                if self.protocol in _S3_PROTOCOLS:
                    files.retries = 1
                self._fsspec_fs = files
            return self._fsspec_fs

    def _request(self, method: str | Callable[..., Any], name: str, timeout_s: float, **options: Any) -> Any:
        """What a method of the protocol returns, or a coroutine that is given its files."""
        try:
            files = self._fsspec_fs or run_in_thread(self._connect, timeout_s)
            path = self._path(name)
            if not isinstance(method, str):
                return run_on_loop(method(files, path, **options), timeout_s)
            if files.async_impl:
                return run_on_loop(getattr(files, f"_{method}")(path, **options), timeout_s)
            return run_in_thread(self._serialized(lambda: getattr(files, method)(path, **options)), timeout_s)
        except (RetryableError, NotFoundError, PermanentError):
            raise
        except Exception as error:
            raise _translate_error(error, self.protocol) from None

    def _serialized(self, request: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self._request_lock:
                return request()

        return run


class _RangeBeyondEnd(Exception):
    """The range begins where the file has ended."""


async def _s3_read_range(fsspec_fs: Any, path: str, start: int, end: int) -> tuple[bytes, int | None, str]:
    """Bytes of an object, its size, and the version they are of, which `cat_file` of s3fs would not tell."""
    bucket, key, version = fsspec_fs.split_path(path)
    which = {"VersionId": version} if version else {}
    answer = await fsspec_fs._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **which)
    try:
        data = await answer["Body"].read()
    finally:
        answer["Body"].close()
    size = answer.get("ContentRange", "").rpartition("/")[2]
    return data, int(size) if size.isdigit() else None, answer.get("ETag", "")


def _to_file_stat(info: dict[str, Any]) -> FileStat:
    version = next((str(info[key]) for key in _VERSION_KEYS if info.get(key)), "")
    return FileStat(info.get("size"), version)


def _translate_error(error: Exception, protocol: str) -> Exception:
    """What an exception of fsspec, or of what it stands on, means for us."""
    kind, text = type(error).__name__, " ".join(str(error).split())[:200]
    keys = _CREDENTIALS_HINT if protocol in _S3_PROTOCOLS else "check the credentials"
    if isinstance(error, FileNotFoundError):
        code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
        return PermanentError(f"there is no such bucket: {keys}") if code == "NoSuchBucket" else NotFoundError("404")
    if isinstance(error, PermissionError):
        return PermanentError(f"it refuses us ({text}): {keys}")
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"):
        return PermanentError(f"no credentials: {keys}")
    if kind in ("ParamValidationError", "InvalidBucketName") or isinstance(error, (NotImplementedError, TypeError)):
        return PermanentError(f"it cannot be asked for this ({text}): check the address")
    if isinstance(error, IsADirectoryError):
        return PermanentError("this is a folder: give its address with a / at its end")
    if isinstance(error, OSError) and error.errno == errno.EINVAL and "range" in text.lower():
        return _RangeBeyondEnd()
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return RetryableError("no full answer in time")
    return RetryableError(f"{kind}: {text}")
