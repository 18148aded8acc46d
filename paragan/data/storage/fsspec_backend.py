"""Files of s3://, and of any other protocol that fsspec knows."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.registry import known_implementations

from paragan.data.storage.filesystem import Entries
from paragan.data.storage.http import PART
from paragan.data.storage.retry import Again, Answer, Facts, Gone, Refused
from paragan.data.storage.timeouts import in_thread, on_loop

_VERSION = ("ETag", "etag", "LastModified", "mtime", "modified", "updated", "created")
_S3 = ("s3", "s3a")
_NEEDS_S3FS = "s3:// needs a package: pip install 'paragan[s3]'"
_KEYS = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), or for a public bucket FSSPEC_S3_ANON=true, "
    "and check the bucket's name and AWS_ENDPOINT_URL"
)


class Other:
    """A folder by a protocol of fsspec. Those that cannot do two things at once are asked one by one."""

    def __init__(self, base: str, timeout_s: float):
        self.base, self.protocol = base, base.partition("://")[0].lower()
        self._files: Any = None
        self._root = ""
        self._opening, self._one = threading.Lock(), threading.Lock()
        self._settings: dict[str, Any] = {"use_listings_cache": False}
        if self.protocol in _S3:  # asking again is ours
            quick = {"connect_timeout": timeout_s, "read_timeout": timeout_s, "retries": {"max_attempts": 0}}
            self._settings |= {"config_kwargs": {**quick, "max_pool_connections": 100}}
        try:
            fsspec.get_filesystem_class(self.protocol)
        except ValueError:
            raise Refused(f"{self.protocol}:// is not known: use http://, https:// or s3://") from None
        except ImportError:
            hint = known_implementations.get(self.protocol, {}).get("err", "install what it needs")
            raise Refused(_NEEDS_S3FS if self.protocol in _S3 else f"it needs a package: {hint}") from None

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Answer:
        stop, size, version = start + PART if end is None else end, None, ""
        try:
            if self.protocol in _S3:
                data, size, version = self._ask(_ranged, name, timeout_s, start=start, end=stop)
            else:
                data = self._ask("cat_file", name, timeout_s, start=start, end=stop)
        except _Beyond:
            data = b""
        if len(data) > stop - start:
            raise Refused("it ignores byte ranges and sends whole files: copy them here first")
        if size is None and len(data) < stop - start:
            size = self.look(name, timeout_s).size
        if size is not None and start + len(data) < min(size, stop):
            raise Again(f"{len(data):,} bytes came of the {stop - start:,} that were asked for")
        return Answer(data, Facts(size, version))

    def look(self, name: str, timeout_s: float) -> Facts:
        return _facts(self._ask("info", name, timeout_s))

    def list(self, folder: str, timeout_s: float) -> tuple[Entries, dict[str, Facts]]:
        seen, files, folders = self._ask("ls", folder, timeout_s, detail=True), dict[str, Facts](), set[str]()
        parent = self._path(folder).strip("/")
        for one in seen:
            path = str(one["name"]).strip("/")
            inside = path.removeprefix(f"{parent}/") if parent else path
            if path == parent and one["type"] != "directory" and len(seen) == 1 and one.get("size"):
                raise Refused("this is a file: give the folder it lies in, or a file of a format known here")
            if path == parent or "/" in inside or inside.startswith("."):
                continue
            if one["type"] == "directory":
                folders.add(inside)
            else:
                files[inside] = _facts(one)
        return Entries({name: files[name].size for name in sorted(files)}, sorted(folders)), files

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}".rstrip("/") if name else self._root

    def _open(self) -> Any:
        """Made when it is needed first: some protocols connect, so this may fail, and is asked again."""
        with self._opening:
            if self._files is None:
                files, self._root = fsspec.url_to_fs(self.base, **self._settings)
                if self.protocol in _S3:
                    files.retries = 1
                self._files = files
            return self._files

    def _ask(self, what: str | Callable[..., Any], name: str, timeout_s: float, **how: Any) -> Any:
        """What a method of the protocol returns, or a coroutine that is given its files."""
        try:
            files = self._files or in_thread(self._open, timeout_s)
            path = self._path(name)
            if not isinstance(what, str):
                return on_loop(what(files, path, **how), timeout_s)
            if files.async_impl:
                return on_loop(getattr(files, f"_{what}")(path, **how), timeout_s)
            return in_thread(self._alone(lambda: getattr(files, what)(path, **how)), timeout_s)
        except (Again, Gone, Refused):
            raise
        except Exception as error:
            raise _meaning(error, self.protocol) from None

    def _alone(self, request: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with self._one:
                return request()

        return run


class _Beyond(Exception):
    """The range begins where the file has ended."""


async def _ranged(files: Any, path: str, start: int, end: int) -> tuple[bytes, int | None, str]:
    """Bytes of an object, its size, and the version they are of, which `cat_file` of s3fs would not tell."""
    bucket, key, version = files.split_path(path)
    which = {"VersionId": version} if version else {}
    answer = await files._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", **which)
    try:
        data = await answer["Body"].read()
    finally:
        answer["Body"].close()
    size = answer.get("ContentRange", "").rpartition("/")[2]
    return data, int(size) if size.isdigit() else None, answer.get("ETag", "")


def _facts(told: dict[str, Any]) -> Facts:
    version = next((str(told[key]) for key in _VERSION if told.get(key)), "")
    return Facts(told.get("size"), version)


def _meaning(error: Exception, protocol: str) -> Exception:
    """What an exception of fsspec, or of what it stands on, means for us."""
    kind, text = type(error).__name__, " ".join(str(error).split())[:200]
    keys = _KEYS if protocol in _S3 else "check the credentials"
    if isinstance(error, FileNotFoundError):
        code = getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")
        return Refused(f"there is no such bucket: {keys}") if code == "NoSuchBucket" else Gone("404")
    if isinstance(error, PermissionError):
        return Refused(f"it refuses us ({text}): {keys}")
    if kind in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "TokenRetrievalError"):
        return Refused(f"no credentials: {keys}")
    if kind in ("ParamValidationError", "InvalidBucketName") or isinstance(error, (NotImplementedError, TypeError)):
        return Refused(f"it cannot be asked for this ({text}): check the address")
    if isinstance(error, IsADirectoryError):
        return Refused("this is a folder: give its address with a / at its end")
    if isinstance(error, OSError) and error.errno == errno.EINVAL and "range" in text.lower():
        return _Beyond()
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)):
        return Again("no full answer in time")
    return Again(f"{kind}: {text}")
