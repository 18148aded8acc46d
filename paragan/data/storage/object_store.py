"""Objects of a bucket: s3://, gs://, az://, through obstore.

Requests block without holding the interpreter's lock. Their timeout is that of the store, not of the single request.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
    UnknownConfigurationKeyError,
)
from obstore.store import from_url

from paragan.data.storage.filesystem import DirListing, is_litter
from paragan.data.storage.obstore_calls import (
    describe_failure,
    describe_status,
    file_stat,
    first_line,
    is_temporary,
    require_not_forked,
)
from paragan.data.storage.retry import (
    PART_BYTES,
    FileStat,
    NotFoundError,
    PermanentError,
    Response,
    RetryableError,
    StoredObject,
    short_response_error,
)
from paragan.data.storage.timeouts import run_in_thread

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
UPLOAD_CONNECTIONS = 4
UPLOAD_PART_BYTES = 5 * 2**20

_CREDENTIALS_HINTS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE), or for a public bucket "
    "AWS_SKIP_SIGNATURE=true, and check the bucket's name and AWS_ENDPOINT_URL",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or for a public bucket GOOGLE_SKIP_SIGNATURE=true, and check the "
    "bucket's name",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY (or AZURE_STORAGE_SAS_TOKEN), and check the "
    "container's name",
}
_METADATA_SERVERS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")  # asked where nothing else is set

T = TypeVar("T")


class ConflictError(Exception):
    """An object was to be written under a condition that does not hold: another process wrote it."""


class ObjectStore:
    """Objects below an address, by their names relative to it. A `StorageBackend` that can also write.

    Safe to use from many threads. Every method returns within about `timeout_s`, or raises RetryableError,
    NotFoundError or PermanentError and nothing else.

    Args:
        address: s3://bucket/prefix, gs://..., az://container/prefix or another that obstore knows.
        timeout_s: of each request.
    """

    def __init__(self, address: str, timeout_s: float):
        scheme, _, rest = address.partition("://")
        bucket, _, prefix = rest.partition("/")
        self._timeout_s = timeout_s
        self._scheme = {"gcs": "gs"}.get(scheme.lower(), scheme.lower())
        self._prefix = prefix.strip("/")
        self._hint = _CREDENTIALS_HINTS[self._scheme[:2] if self._scheme[:2] in _CREDENTIALS_HINTS else "az"]
        options: dict[str, Any] = {
            "client_options": {"timeout": timedelta(seconds=timeout_s), "allow_http": True, "user_agent": "paragan"},
            "retry_config": {"max_retries": 0},  # `retry` does the retries
        }
        if not bucket:
            raise PermanentError(f"names no bucket. Use {self._scheme}://BUCKET/NAME")
        if self._scheme.startswith("s3"):
            options |= _s3_options()
        try:
            self._store = from_url(f"{self._scheme}://{bucket}/", **options)
        except (BaseError, ValueError) as error:
            raise PermanentError(f"{first_line(error)}: check the address, or {self._hint}") from None

    # Reading ----------------------------------------------------------------------------------------------

    def fetch(self, name: str, start: int, end: int | None, timeout_s: float) -> Response:
        """Read bytes `start` to `end`; None: the first PART_BYTES."""
        stop = start + PART_BYTES if end is None else end
        path = self._path(name)

        def get() -> tuple[bytes, FileStat]:
            result = obstore.get(self._store, path, options={"range": (start, stop)})
            return bytes(result.bytes()), file_stat(result.meta)

        try:
            data, stat = self._request(get, timeout_s)
        except _InvalidRange:
            return Response(b"", self.stat(name, timeout_s))
        if stat.size is None or start + len(data) != min(stat.size, stop):
            raise short_response_error(len(data), stop - start)
        return Response(data, stat)

    def stat(self, name: str, timeout_s: float) -> FileStat:
        """Return the size and version of an object."""
        return file_stat(self._request(lambda: obstore.head(self._store, self._path(name)), timeout_s))

    def list_dir(self, folder: str, timeout_s: float) -> tuple[DirListing, dict[str, FileStat]]:
        """List a folder, with sizes and versions."""
        parent = self._path(folder)
        result = self._request(lambda: obstore.list_with_delimiter(self._store, parent or None), timeout_s)
        names = {str(meta["path"]).rpartition("/")[2]: file_stat(meta) for meta in result["objects"]}
        files = {name: names[name] for name in sorted(names) if name and not is_litter(name)}
        folders = sorted(path.rpartition("/")[2] for path in map(str, result["common_prefixes"]))
        if parent and not files and not folders:
            with suppress(NotFoundError):
                self.stat(folder, timeout_s)
                raise PermanentError("this is a file: give its folder, or a file of a supported format")
            raise NotFoundError("404")
        sizes = {name: stat.size for name, stat in files.items()}
        return DirListing(sizes, [name for name in folders if not is_litter(name)]), files

    def list_all(self, folder: str, timeout_s: float) -> dict[str, FileStat]:
        """Return all objects below a folder, by name; {} if there are none.

        Empty ones are left out: consoles make them to show a folder, and they cannot be read by the name in the list.
        """
        parent = self._path(folder)

        def collect() -> list[Any]:
            return [meta for page in obstore.list(self._store, parent or None) for meta in page]

        above = f"{self._prefix}/" if self._prefix else ""
        objects = self._request(collect, timeout_s)
        return {str(meta["path"]).removeprefix(above): file_stat(meta) for meta in objects if meta["size"]}

    def get(self, name: str, timeout_s: float) -> StoredObject:
        """Read a whole, small object in one request."""
        path = self._path(name)

        def read() -> StoredObject:
            result = obstore.get(self._store, path)
            version = {key: value for key in ("e_tag", "version") if (value := result.meta[key]) is not None}
            return StoredObject(bytes(result.bytes()), version)

        return self._request(read, timeout_s)

    # Writing ----------------------------------------------------------------------------------------------

    def put(self, name: str, data: bytes | Path, timeout_s: float) -> None:
        """Write an object, complete or not at all. A file is read in parts; `timeout_s` is for each of them."""
        path = self._path(name)

        def write() -> object:
            return obstore.put(
                self._store, path, data, chunk_size=UPLOAD_PART_BYTES, max_concurrency=UPLOAD_CONNECTIONS
            )

        self._request(write, None)

    def put_if(self, name: str, data: bytes, replaces: StoredObject | None, timeout_s: float) -> None:
        """Write an object if it is still `replaces`; None: if there is none yet.

        Raises:
            ConflictError: it is another one.
        """
        mode: Any = replaces.version if replaces else "create"
        path = self._path(name)
        self._request(lambda: obstore.put(self._store, path, data, mode=mode, use_multipart=False), timeout_s)

    def delete(self, names: Iterable[str], timeout_s: float) -> None:
        """Delete objects; those that do not exist do not count."""
        paths = [self._path(name) for name in names]
        with suppress(NotFoundError):
            self._request(lambda: obstore.delete(self._store, paths), timeout_s)

    def _path(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name.strip("/")) if part)

    def _request(self, request: Callable[[], T], timeout_s: float | None) -> T:
        """Do a request. It takes another thread if it may take too long here: the main thread answers signals.

        Args:
            timeout_s: of all of it; None: of each part, which is that of the store.
        """
        require_not_forked()
        try:
            if timeout_s is None:
                return request()
            if timeout_s < self._timeout_s or threading.current_thread() is threading.main_thread():
                return run_in_thread(request, timeout_s)
            return request()
        except (RetryableError, NotFoundError, PermanentError):
            raise
        except Exception as error:
            raise self._translate(error) from None

    def _translate(self, error: Exception) -> Exception:
        """Return one of our errors for an exception of obstore."""
        text = str(error)
        if "NoSuchBucket" in text or "ContainerNotFound" in text or "The specified bucket does not exist" in text:
            return PermanentError("there is no such bucket: create it, or check its name and the address of the server")
        if any(server in text for server in _METADATA_SERVERS):
            return PermanentError(f"no credentials: {self._hint}")
        if "InvalidCertificate" in text:
            return PermanentError("its certificate is not trusted: check the address, or set SSL_CERT_FILE")
        status, reason = describe_status(error)
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            return PermanentError(f"it denies access ({status or first_line(error)}): {self._hint}")
        if isinstance(error, (AlreadyExistsError, PreconditionError)):
            return ConflictError("another process wrote it")
        if isinstance(error, FileNotFoundError):
            return NotFoundError("404")
        if isinstance(error, (UnicodeEncodeError, InvalidPathError, NotSupportedError, UnknownConfigurationKeyError)):
            return PermanentError(f"it does not support this request ({first_line(error)}): check the address")
        if status == 416:
            return _InvalidRange()
        if status in (301, 307, 308):
            return PermanentError("the bucket is in another region: set AWS_REGION to its region")
        if status and not is_temporary(status):
            return PermanentError(f"it answers {status} {reason}: {self._hint}")
        return RetryableError(f"it answers {status} {reason}" if status else describe_failure(error))


class _InvalidRange(Exception):
    """The range begins at or after the end of the object."""


def _s3_options() -> dict[str, Any]:
    """Return what obstore does not take from the environment as other programs do."""
    environment = os.environ
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        if "://" not in environment.get(name, "://"):
            raise PermanentError(f"{name}={environment[name]} has no scheme. Use http:// or https:// before it")
    if environment.get("FSSPEC_S3_ANON", "").lower() in ("1", "true"):
        return {"config": {"skip_signature": True}}
    profiles = Path(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()
    has_keys = "AWS_ACCESS_KEY_ID" in environment or "AWS_SKIP_SIGNATURE" in environment
    if has_keys or not ("AWS_PROFILE" in environment or profiles.is_file()):
        return {}
    try:
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise PermanentError("profiles of AWS need a package: pip install boto3") from None
    try:
        return {"credential_provider": Boto3CredentialProvider(Session())}
    except Exception as error:  # botocore's errors have no common class, and there may be no credentials
        raise PermanentError(f"no credentials ({first_line(error)}): {_CREDENTIALS_HINTS['s3']}") from None
