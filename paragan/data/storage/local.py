"""TODO: docstring of paragan/data/storage/local.py"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO

from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import DirListing, printable

MAX_OPEN_FILES = 128  # files of a folder that stay open


class LocalFileSystem:
    """A folder of this machine."""

    is_remote = False

    def __init__(self, root: Path):
        self.root, self.location = root, printable(root)
        self._open_files: dict[str, _OpenFile] = {}

    def display_path(self, name: str) -> str:
        return printable(self.root / name)

    def list_dir(self, folder: str = "") -> DirListing:
        with os.scandir(self.root / folder) as found:
            seen = sorted((e for e in found if not e.name.startswith(".")), key=lambda e: e.name)
        folders = [e.name for e in seen if e.is_dir()]
        return DirListing({e.name: None for e in seen if not e.is_dir() and (e.is_file() or e.is_symlink())}, folders)

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        if size is None:
            with (self.root / name).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, start) if start else file.read()
        file = self._open_files.get(name) or self._open_cached(name)
        try:
            data = os.pread(file.fd, size, start)
        except OSError:  # a stale one may be opened anew
            self._open_files.pop(name, None)
            raise
        if len(data) != size:
            raise DecodeError(f"ends after {start + len(data):,} bytes, {start + size:,} were expected")
        return data

    def open(self, name: str) -> BinaryIO:
        return (self.root / name).open("rb")

    def _open_cached(self, name: str) -> _OpenFile:
        """A file of which parts are read, opened; the oldest of too many is closed once nobody reads it."""
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread was there
            if len(self._open_files) >= MAX_OPEN_FILES:
                self._open_files.pop(next(iter(self._open_files)))
        self._open_files[name] = file = _OpenFile(self.root / name)
        return file


class _OpenFile:
    """A file that is closed when nobody knows it any more."""

    fd = -1

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
