"""Folders of this machine. Files that are read in parts stay open, up to MAX_OPEN_FILES of a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import DirListing, is_litter, printable

MAX_OPEN_FILES = 128


class LocalFileSystem:
    """A `FileSystem` over a folder of this machine."""

    is_remote = False

    def __init__(self, root: Path):
        self.root = root
        self.location = printable(root)
        self._open_files: dict[str, _OpenFile] = {}

    @property
    def local_root(self) -> Path | None:
        """The folder."""
        return self.root

    def display_path(self, name: str) -> str:
        """Return the path of a file as messages show it."""
        return printable(self.root / name)

    def list_dir(self, folder: str = "") -> DirListing:
        """List the files and folders directly in `folder`, sorted by name; sizes are not looked up."""
        with os.scandir(self.root / folder) as scan:
            entries = sorted((e for e in scan if not is_litter(e.name)), key=lambda e: e.name)
        folders = [e.name for e in entries if e.is_dir()]
        files = [e.name for e in entries if not e.is_dir() and (e.is_file() or e.is_symlink())]
        return DirListing(dict.fromkeys(files), folders)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return (self.root / name).stat().st_size

    def version(self, name: str) -> str:
        """Return the time when a file was last written."""
        return f"mtime {(self.root / name).stat().st_mtime_ns}"

    def read(self, name: str, start: int = 0, size: int | None = None) -> bytes:
        """Read exactly `size` bytes from `start` on; None reads to the end."""
        if size is None:
            with (self.root / name).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, start) if start else file.read()
        file = self._open_files.get(name) or self._open_cached(name)
        try:
            data = os.pread(file.fd, size, start)
        except OSError:  # the handle may be stale: the next read opens the file again
            self._open_files.pop(name, None)
            raise
        if len(data) != size:
            raise truncated_error(start + len(data), start + size)
        return data

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""
        return (self.root / name).open("rb")

    def _open_cached(self, name: str) -> _OpenFile:
        """Open a file and keep it open. The oldest of too many is dropped; it closes once no thread reads it."""
        with contextlib.suppress(StopIteration, KeyError, RuntimeError):  # another thread changed the dict
            if len(self._open_files) >= MAX_OPEN_FILES:
                self._open_files.pop(next(iter(self._open_files)))
        self._open_files[name] = file = _OpenFile(self.root / name)
        return file


class _OpenFile:
    """A file descriptor that is closed when the last reference to it is gone."""

    fd = -1

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # an argument: `os` is gone when Python exits
        if self.fd >= 0:
            close(self.fd)


def truncated_error(available: int, requested: int) -> DecodeError:
    """Return the error for a file that ends before the requested byte."""
    return DecodeError(f"ends after {available:,} bytes, {requested:,} were expected")
