"""TODO: docstring of paragan/data/storage/open_location.py"""

from __future__ import annotations

from pathlib import Path

from paragan.data.storage.filesystem import FileSystem, RemoteOptions, is_url
from paragan.data.storage.local import LocalFileSystem


def open_location(location: str, remote: RemoteOptions | None = None) -> tuple[FileSystem, str]:
    """The folder that `where` names, or lies in, and the name of a file in it ("" for the folder itself)."""
    if is_url(location):
        from paragan.data.storage.remote import open_remote  # fsspec is slow to import, and only needed here

        return open_remote(location, remote or RemoteOptions())
    path = Path(location)
    return (LocalFileSystem(path), "") if path.is_dir() else (LocalFileSystem(path.parent), path.name)
