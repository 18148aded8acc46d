"""The interface of folders that hold data, local or remote, and names that are safe to print.

Addresses may carry a password or a signature. Nothing that is printed or written shows them: `redact` and `redact_url`
replace them by `***` and `?...`, also in run.yaml, so a resume needs the address again (`require_credentials`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.data.storage.disk_cache import default_cache_dir

# Where a record lies: name of the file, first byte, size (None: the whole file), CRC-32 if known.
ByteRange = tuple[str, int, int | None, int | None]

_HUB_KINDS = ("datasets", "models", "spaces", "buckets")  # of repositories of the Hugging Face hub
_CREDENTIALS_MASK = "***"  # replaces a user name with a password
_QUERY_MASK = "?..."  # replaces a query, such as a signature
_URL = re.compile(r"^[a-z][a-z0-9+.-]+://", re.IGNORECASE)


@config_class
class RemoteOptions:
    """How remote storage is read.

    cache_dir   : folder that caches what was downloaded ("" for none, auto: ~/.cache/paragan/data)
    cache_gb    : size limit of the cache; 0 for half of the free space
    timeout_s   : a request without a full response within this time is retried
    retry_for_s : how long a request is retried, with growing pauses, before the run ends
    """

    cache_dir: str = "auto"
    cache_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    retry_for_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 120.0

    @property
    def resolved_cache_dir(self) -> str:
        """The folder of the cache, "" for none."""
        return default_cache_dir() if self.cache_dir == "auto" else self.cache_dir


@dataclass(frozen=True)
class DirListing:
    """The contents of a folder, without hidden files.

    files   : name -> size in bytes; None where the listing does not tell
    folders : names
    """

    files: dict[str, int | None]
    folders: list[str]


class FileSystem(Protocol):
    """A folder of files, local or remote. Names are relative to it, with `/`. Safe to use from many threads.

    Errors: `DecodeError` for a file that is missing or shorter than the requested range, `RunError` for storage that
    cannot be reached, `UsageError` for storage that denies access. Local folders also raise OSError.
    """

    @property
    def location(self) -> str:
        """The path or address of the folder, as messages show it."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether reading takes a network request."""
        ...

    @property
    def local_root(self) -> Path | None:
        """The folder on this machine, None if it is remote."""
        ...

    def display_path(self, name: str) -> str:
        """Return the path or address of a file as messages show it."""
        ...

    def list_dir(self, folder: str = "") -> DirListing:
        """List the files and folders directly in `folder`, sorted by name."""
        ...

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def version(self, name: str) -> str:
        """Return what changes when a file is replaced: "mtime ..." or "server ...", "" if the server tells nothing."""
        ...

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Read exactly `size` bytes from `start` on; None reads to the end."""
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading, seekable, for libraries that read files."""
        ...


@runtime_checkable
class SeekableSource(Protocol):
    """A source whose records are unchanged byte ranges of files, which another process can read by itself."""

    @property
    def fs(self) -> FileSystem:
        """The folder of the files."""
        ...

    def byte_ranges(self, index: np.ndarray) -> list[ByteRange]:
        """Return where the records `index` [n] lie."""
        ...


def is_url(location: str) -> bool:
    """Return whether a location is an address (https://..., s3://...) rather than a path of this machine."""
    return _URL.match(location) is not None


def expand_hub_address(location: str) -> str:
    """Return the whole address of a data set of the Hugging Face hub: hf://user/name is hf://datasets/user/name."""
    scheme, mark, path = location.partition("://")
    if not mark or scheme.lower() != "hf" or path.partition("/")[0] in _HUB_KINDS:
        return location
    return f"hf://datasets/{path}"


def is_litter(name: str) -> bool:
    """Return whether a file or folder is what a desktop leaves behind, or hidden: it is no data."""
    return name.startswith(".") or name.lower() in ("__macosx", "thumbs.db", "desktop.ini")


def printable(name: str | Path) -> str:
    """Return a name with control and undecodable characters escaped, so that it stays on one line."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(name))


def abbreviate(names: Sequence[str], limit: int = 3, max_chars: int = 80) -> str:
    """Return the first `limit` names, each printable and cut to `max_chars`, and ", ..." if there are more."""
    text = ", ".join(printable(name)[:max_chars] for name in names[:limit])
    return f"{text}, ..." if len(names) > limit else text


def absolute_location(location: str) -> str:
    """Return the absolute path of a path; an address, the word `digits` and "" as they are."""
    return location if location in ("", "digits") or is_url(location) else str(Path(location).absolute())


def redact_url(location: str) -> str:
    """Return a path as it is, or an address without its password and signature."""
    return redact(location) if is_url(location) else location


def require_credentials(location: str) -> None:
    """Raise UsageError for an address whose password or signature was replaced by `redact_url`."""
    if is_url(location) and (f"://{_CREDENTIALS_MASK}@" in location or location.endswith(_QUERY_MASK)):
        raise UsageError(f"data: {location} needs its password or signature, which is never saved. Give --data again")


def redact(text: str) -> str:
    """Return a text without the passwords and signatures of the addresses in it."""
    return re.sub(r"\?[^\s:]\S*", _QUERY_MASK, re.sub(r"://[^/\s]*@", f"://{_CREDENTIALS_MASK}@", text))


def format_error(error: BaseException) -> str:
    """Return the message of an error on one line, or the name of its class if it has none."""
    return printable(" ".join(str(error).split()))[:300] or type(error).__name__
