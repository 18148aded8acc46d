"""TODO: docstring of paragan/data/storage/open_location.py"""

from __future__ import annotations

from pathlib import Path

from paragan.data.storage.filesystem import Place, Reach, is_address
from paragan.data.storage.local import Here


def place_of(where: str, reach: Reach | None = None) -> tuple[Place, str]:
    """The folder that `where` names, or lies in, and the name of a file in it ("" for the folder itself)."""
    if is_address(where):
        from paragan.data.storage.remote import far_place  # fsspec is slow to import, and only needed here

        return far_place(where, reach or Reach())
    path = Path(where)
    return (Here(path), "") if path.is_dir() else (Here(path.parent), path.name)
