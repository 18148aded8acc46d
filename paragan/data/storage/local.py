"""TODO: docstring of paragan/data/storage/local.py"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import Entries, shown

KEPT = 128  # files of a folder that stay open


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
