"""Open what a path or an address names."""

from __future__ import annotations

from pathlib import Path

from paragan.data.storage.filesystem import FileSystem, RemoteOptions, is_url
from paragan.data.storage.local import LocalFileSystem


def open_location(location: str, remote: RemoteOptions | None = None) -> tuple[FileSystem, str]:
    """Open the folder that `location` names, or the folder of the file that it names.

    Returns:
        The folder, and the name of the file in it ("" if `location` is the folder itself).
    """
    if is_url(location):
        from paragan.data.storage.remote import open_remote  # fsspec is slow to import

        return open_remote(location, remote or RemoteOptions())
    path = Path(location)
    return (LocalFileSystem(path), "") if path.is_dir() else (LocalFileSystem(path.parent), path.name)
