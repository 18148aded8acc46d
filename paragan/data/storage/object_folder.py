"""A folder of an object store, whose requests are tried again, and copies of it on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from paragan.core.atomic_write import atomic_output, atomic_write_bytes
from paragan.core.errors import RunError, UsageError
from paragan.data.source import DecodeError
from paragan.data.storage.disk_cache import default_cache_dir
from paragan.data.storage.filesystem import RemoteOptions, redact
from paragan.data.storage.object_store import SCHEMES, ConflictError, ObjectStore
from paragan.data.storage.retry import FileStat, PermanentError, StoredObject, retry

REQUEST_OPTIONS = RemoteOptions(cache_dir="", timeout_s=60.0, retry_for_s=20.0)  # a slow link needs long for a part
READ_PART_BYTES = 16 * 2**20  # of a file, per request
DOWNLOAD_ATTEMPTS = 5  # of an object that is replaced meanwhile
VERSIONS_FILE = ".versions.json"  # in a copy: size and version of every object

T = TypeVar("T")


def is_object_address(location: str) -> bool:
    """Return whether a location is an address in an object store: s3://bucket/folder, gs://..., az://..."""
    scheme, separator, _ = location.partition("://")
    return bool(separator) and scheme.lower() in SCHEMES


class ObjectFolder:
    """A folder of an object store. Names are relative to it. Safe to use from many threads.

    Args:
        address: s3://bucket/folder or the like.
        field: the option that names it, for messages.
        options: timeouts of requests.

    Raises:
        UsageError: the address cannot be used.
    """

    def __init__(self, address: str, field: str, options: RemoteOptions = REQUEST_OPTIONS):
        scheme, _, path = address.partition("://")
        self.address = f"{scheme}://{path.strip('/')}"
        self._field = field
        if ":" in path.partition("/")[0].rpartition("@")[0]:
            raise UsageError(
                f"{field}: {redact(self.address)} has a password in it, which would be saved. Set the variables for "
                "credentials instead (docs/data.md)"
            )
        self._options = options
        try:
            self.store = ObjectStore(self.address, options.timeout_s)
        except PermanentError as error:
            raise UsageError(f"{field}: {self.address}: {error}") from None

    def local_copy(self, kind: str) -> Path:
        """Return where the copy of the folder lies on this machine: in the cache of this user.

        Args:
            kind: "runs" for a copy in which a run trains, "copies" for one that commands read.
        """
        name = re.sub(r"[^a-zA-Z0-9]+", "-", self.address)[-60:].strip("-")
        digest = hashlib.sha256(f"{os.environ.get('AWS_ENDPOINT_URL', '')} {self.address}".encode()).hexdigest()[:12]
        return Path(default_cache_dir()).parent / kind / f"{name}-{digest}"

    def list_all(self, folder: str = "") -> dict[str, FileStat]:
        """Return all objects below a folder of this one, by name."""
        return self._retry(lambda timeout_s: self.store.list_all(folder, timeout_s), folder)

    def read(self, name: str) -> StoredObject | None:
        """Read a whole, small object. None if there is none."""
        try:
            return self._retry(lambda timeout_s: self.store.get(name, timeout_s), "")
        except DecodeError:
            return None

    def download(self, name: str, path: Path) -> None:
        """Download an object to a file, which is complete or absent. Every part is tried again if it fails.

        Raises:
            UsageError: there is no such object.
            RunError: it was replaced again and again while it was downloaded.
        """
        try:
            with atomic_output(path) as temporary:
                for _ in range(DOWNLOAD_ATTEMPTS):
                    if self._download_version(name, temporary):
                        return
        except DecodeError:
            raise UsageError(f"{self._field}: {self.address}/{name} has disappeared: check the address") from None
        raise RunError(f"{self._field}: {self.address}/{name} is replaced while it is downloaded, again and again")

    def _download_version(self, name: str, path: Path) -> bool:
        """Download an object in parts. Returns whether all were of the same version."""
        with path.open("wb") as file:
            first: FileStat | None = None
            while first is None or file.tell() < (first.size or 0):
                start = file.tell()
                end = start + READ_PART_BYTES
                response = self._retry(
                    lambda timeout_s, start=start, end=end: self.store.fetch(name, start, end, timeout_s), name
                )
                first = first or response.stat
                if response.stat != first:
                    return False
                file.write(response.data)
            file.flush()
            os.fsync(file.fileno())
        return True

    def write(self, name: str, data: bytes | Path) -> None:
        """Write an object, complete or not at all.

        Raises:
            FileNotFoundError: `data` is a file that does not exist any more.
            RunError: it could not be written now.
        """
        try:
            self._retry(lambda timeout_s: self.store.put(name, data, timeout_s), name)
        except DecodeError as error:
            if isinstance(data, Path) and not data.exists():
                raise FileNotFoundError(str(data)) from None
            raise RunError(f"{self._field}: {self.address}/{name}: {error}") from None

    def write_if(self, name: str, data: bytes, replaces: StoredObject | None) -> None:
        """Write an object if it is still `replaces`; None: if there is none yet. Raises ConflictError."""
        try:
            self._retry(lambda timeout_s: self.store.put_if(name, data, replaces, timeout_s), "")
        except DecodeError:
            raise ConflictError("it was deleted") from None

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that do not exist do not count."""
        self._retry(lambda timeout_s: self.store.delete(names, timeout_s), "")

    def _retry(self, request: Callable[[float], T], name: str) -> T:
        return retry(request, f"{self.address}/{name}".rstrip("/"), self._options, self._field)


def download_changed(folder: ObjectFolder, names: Mapping[str, FileStat], local: Path) -> None:
    """Download the objects that a copy lacks, or has in another size: for objects that are never replaced."""
    for name, stat in names.items():
        path = local / name
        if not path.is_file() or path.stat().st_size != stat.size:
            folder.download(name, path)


def download_for_reading(address: str, field: str) -> Path:
    """Download a run folder or a model folder, unless it is as it was. Returns the copy.

    Of checkpoints, the copy has only what says how far the run was.

    Args:
        address: of the folder in an object store.
        field: the option that names it, for messages.

    Raises:
        UsageError: there is no such folder, or it cannot be read.
    """
    folder = ObjectFolder(address, field)
    local = folder.local_copy("copies")
    local.mkdir(mode=0o700, parents=True, exist_ok=True)
    versions_path = local / VERSIONS_FILE
    there = {name: stat for name, stat in folder.list_all().items() if _is_for_reading(name)}
    shutil.rmtree(local / "checkpoints", ignore_errors=True)  # of the last download
    if not there:
        raise UsageError(f"{field}: {folder.address} has no files: check the address")
    known = json.loads(versions_path.read_text()) if versions_path.exists() else {}
    for name in sorted(there, key=lambda name: name.endswith("config.json")):  # it has the checksums of the weights
        version = [there[name].size, there[name].version]
        if known.get(name) != version or not (local / name).is_file():
            folder.download(name, local / name)
            known[name] = version
    atomic_write_bytes(versions_path, json.dumps(known).encode())
    return local


def _is_for_reading(name: str) -> bool:
    is_weights_of_checkpoint = name.startswith("checkpoints/") and not name.endswith("/checkpoint.json")
    return not is_weights_of_checkpoint and not name.startswith(".")
