"""Where files lie: a folder here, or an address far away."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol, runtime_checkable

import numpy as np
from pydantic import Field

from paragan.core.errors import Unusable
from paragan.core.schema import record
from paragan.data.storage.disk_cache import default_cache

_WHO, _QUERY = "***", "?..."  # stand for a user with a password, and for a signature
_ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]+://", re.IGNORECASE)


@record
class Reach:
    """How far places are reached.

    cache      : folder that keeps what came from far away ("" for none, auto: ~/.cache/paragan/data)
    cache_gb   : how much of it, 0 for half of what is free there
    timeout_s  : a request that is not answered in full within this is asked again
    patience_s : for how long it is asked again, with growing pauses, before the place counts as out of reach
    """

    cache: str = "auto"
    cache_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    patience_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 120.0

    @property
    def folder(self) -> str:
        """The cache's, "" for none."""
        return default_cache() if self.cache == "auto" else self.cache


@dataclass(frozen=True)
class Entries:
    """What lies in a folder, by name, without hidden ones. Sizes in bytes; None where only asking would tell."""

    files: dict[str, int | None]
    folders: list[str]


class Place(Protocol):
    """A folder of files, here or far away. Names in it are relative, with `/`. Safe to use from many threads.

    Whatever cannot be had raises: `DecodeError` for a file that is gone, or shorter than what is asked for; `Failed`
    for a place that cannot be reached; `Unusable` for one that refuses us. Locally also OSError.
    """

    @property
    def where(self) -> str: ...  # as messages call it
    @property
    def remote(self) -> bool: ...

    def at(self, name: str) -> str:
        """The path or address of a file, as messages call it."""
        ...

    def entries(self, folder: str = "") -> Entries:
        """Files and folders directly in `folder`, in the order of their names."""
        ...

    def size(self, name: str) -> int: ...

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Exactly `size` bytes from `start` on, or all of it."""
        ...

    def open(self, name: str) -> BinaryIO:
        """The file, seekable, for formats that are read by libraries."""
        ...


def is_address(where: str) -> bool:
    """Whether it names something by protocol: https://..., s3://..., rather than a path of this machine."""
    return _ADDRESS.match(where) is not None


def shown(name: str | Path) -> str:
    """A name that stays on one line and can be printed: control and undecodable characters escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in str(name))


def public(where: str) -> str:
    """A path, or an address without its password or signature: what may be written down."""
    return masked(where) if is_address(where) else where


def refuse_public(where: str) -> None:
    """`Unusable` for an address whose password or signature was left out by `public`."""
    if is_address(where) and (f"://{_WHO}@" in where or where.endswith(_QUERY)):
        raise Unusable(f"data: {where} needs its password or signature, which is never written down: give --data again")


def masked(text: str) -> str:
    """A line without the passwords and signatures that addresses in it carry."""
    return re.sub(r"\?[^\s:]\S*", _QUERY, re.sub(r"://[^/\s]*@", f"://{_WHO}@", text))


def one_line(error: BaseException) -> str:
    """What an error says, on one line; its kind where it says nothing."""
    return shown(" ".join(str(error).split()))[:300] or type(error).__name__


Spot = tuple[str, int, int | None, int | None]  # where a record lies: name of the file, start, size, CRC-32 if known


@runtime_checkable
class Plain(Protocol):
    """A source whose records lie in files as they are, so that another process can read them by itself."""

    @property
    def place(self) -> Place: ...

    def spots(self, index: np.ndarray) -> list[Spot]:
        """Of many records, [n]."""
        ...
