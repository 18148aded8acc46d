"""Where files lie: a folder here, or an address far away."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.data.storage.disk_cache import default_cache_dir

_CREDENTIALS_MASK, _QUERY_MASK = "***", "?..."  # stand for a user with a password, and for a signature
_URL = re.compile(r"^[a-z][a-z0-9+.-]+://", re.IGNORECASE)


@config_class
class RemoteOptions:
    """How far places are reached.

    cache      : folder that keeps what came from far away ("" for none, auto: ~/.cache/paragan/data)
    cache_gb   : how much of it, 0 for half of what is free there
    timeout_s  : a request that is not answered in full within this is asked again
    patience_s : for how long it is asked again, with growing pauses, before the place counts as out of reach
    """

    cache_dir: str = "auto"
    cache_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    retry_for_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 120.0

    @property
    def resolved_cache_dir(self) -> str:
        """The cache's, "" for none."""
        return default_cache_dir() if self.cache_dir == "auto" else self.cache_dir


@dataclass(frozen=True)
class DirListing:
    """What lies in a folder, by name, without hidden ones. Sizes in bytes; None where only asking would tell."""

    files: dict[str, int | None]
    folders: list[str]


class FileSystem(Protocol):
    """A folder of files, here or far away. Names in it are relative, with `/`. Safe to use from many threads.

    Whatever cannot be had raises: `DecodeError` for a file that is gone, or shorter than what is asked for; `Failed`
    for a place that cannot be reached; `Unusable` for one that refuses us. Locally also OSError.
    """

    @property
    def location(self) -> str: ...  # as messages call it
    @property
    def is_remote(self) -> bool: ...

    def display_path(self, name: str) -> str:
        """The path or address of a file, as messages call it."""
        ...

    def list_dir(self, folder: str = "") -> DirListing:
        """Files and folders directly in `folder`, in the order of their names."""
        ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Exactly `size` bytes from `start` on, or all of it."""
        ...

    def open(self, name: str) -> BinaryIO:
        """The file, seekable, for formats that are read by libraries."""
        ...


def is_url(location: str) -> bool:
    """Whether it names something by protocol: https://..., s3://..., rather than a path of this machine."""
    return _URL.match(location) is not None


def printable(name: str | Path) -> str:
    """A name that stays on one line and can be printed: control and undecodable characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(name))


def redact_url(location: str) -> str:
    """A path, or an address without its password or signature: what may be written down."""
    return redact(location) if is_url(location) else location


def require_credentials(location: str) -> None:
    """`Unusable` for an address whose password or signature was left out by `public`."""
    if is_url(location) and (f"://{_CREDENTIALS_MASK}@" in location or location.endswith(_QUERY_MASK)):
        raise UsageError(
            f"data: {location} needs its password or signature, which is never written down: give --data again"
        )


def redact(text: str) -> str:
    """A line without the passwords and signatures that addresses in it carry."""
    return re.sub(r"\?[^\s:]\S*", _QUERY_MASK, re.sub(r"://[^/\s]*@", f"://{_CREDENTIALS_MASK}@", text))


def format_error(error: BaseException) -> str:
    """What an error says, on one line; its kind where it says nothing."""
    return printable(" ".join(str(error).split()))[:300] or type(error).__name__


ByteRange = tuple[
    str, int, int | None, int | None
]  # where a record lies: name of the file, start, size, CRC-32 if known


@runtime_checkable
class SeekableSource(Protocol):
    """A source whose records lie in files as they are, so that another process can read them by itself."""

    @property
    def fs(self) -> FileSystem: ...

    def byte_ranges(self, index: np.ndarray) -> list[ByteRange]:
        """Of many records, [n]."""
        ...
