"""Where files lie: a folder here, or an address far away."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO, Protocol

from pydantic import Field

from paragan.config import record
from paragan.data.decode import DecodeError
from paragan.data.far.cache import default_cache
from paragan.errors import Unusable

KEPT = 128  # files of a folder that stay open
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


class Here:
    """A folder of this machine."""

    remote = False

    def __init__(self, path: Path):
        self.path, self.where = path, shown(path)
        self._opened: dict[str, _Opened] = {}

    def at(self, name: str) -> str:
        return shown(self.path / name)

    def entries(self, folder: str = "") -> Entries:
        with os.scandir(self.path / folder) as found:
            seen = sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)
        folders = [e.name for e in seen if e.is_dir()]
        return Entries({e.name: None for e in seen if not e.is_dir() and (e.is_file() or e.is_symlink())}, folders)

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        if size is None:
            with (self.path / name).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, start) if start else file.read()
        file = self._opened.get(name) or self._keep(name)
        try:
            data = os.pread(file.number, size, start)
        except OSError:  # a stale one may be opened anew
            self._opened.pop(name, None)
            raise
        if len(data) != size:
            raise DecodeError(f"ends after {start + len(data):,} bytes, {start + size:,} were expected")
        return data

    def open(self, name: str) -> BinaryIO:
        return (self.path / name).open("rb")

    def _keep(self, name: str) -> _Opened:
        """A file of which parts are read, opened; the oldest of too many is closed once nobody reads it."""
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread was there
            if len(self._opened) >= KEPT:
                self._opened.pop(next(iter(self._opened)))
        self._opened[name] = file = _Opened(self.path / name)
        return file


class _Opened:
    """A file that is closed when nobody knows it any more."""

    number = -1

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)


def is_address(where: str) -> bool:
    """Whether it names something by protocol: https://..., s3://..., rather than a path of this machine."""
    return _ADDRESS.match(where) is not None


def place_of(where: str, reach: Reach | None = None) -> tuple[Place, str]:
    """The folder that `where` names, or lies in, and the name of a file in it ("" for the folder itself)."""
    if is_address(where):
        from paragan.data.far.far import far_place  # fsspec is slow to import, and only needed here

        return far_place(where, reach or Reach())
    path = Path(where)
    return (Here(path), "") if path.is_dir() else (Here(path.parent), path.name)


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
