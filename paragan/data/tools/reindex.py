"""Rebuild the index of tar shards: `paragan data index`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError
from paragan.data.formats.tar_index import TarIndex, build_index
from paragan.data.formats.webdataset import INDEX_FILE, is_shard_pattern, list_shards, shard_sizes
from paragan.data.storage.filesystem import FileSystem, is_url, printable, redact_url
from paragan.data.storage.open_location import open_location


def reindex(location: str, out: Path | None = None, log: Callable[[str], None] | None = None) -> tuple[TarIndex, Path]:
    """Read tar shards and write their index.

    Args:
        location: a folder of shards, one shard, or a pattern.
        out: the file to write; None for INDEX_FILE in the folder of the shards.
        log: is called with a line for every shard.

    Returns:
        The index, and the file that was written.

    Raises:
        UsageError: there are no shards, one is damaged, or they are remote and `out` is None.
    """
    fs, pattern = _locate_shards(location)
    if out is None:
        if fs.local_root is None:
            raise UsageError(
                f"{printable(redact_url(location))}: is remote and cannot be written. Give --out {INDEX_FILE}, "
                "and put it into the folder of the tars"
            )
        out = fs.local_root / INDEX_FILE
    sizes = shard_sizes(fs, pattern)
    index = build_index(fs, list(sizes), list(sizes.values()), log)
    with atomic_output(out) as path:
        path.write_bytes(index.to_bytes())
    return index, out


def _locate_shards(location: str) -> tuple[FileSystem, str]:
    """Return the folder of the shards, and the pattern of their names."""
    display_name = printable(redact_url(location))
    parent, _, last = location.rpartition("/")
    folder = location
    is_pattern = is_shard_pattern(last) and (is_url(location) or not Path(location).exists())
    if is_pattern:
        folder = f"{parent}/" if parent or location.startswith("/") else "."
    if not is_url(location) and not Path(folder).exists():
        raise UsageError(f"data: {display_name} does not exist. Give a folder of tars, or such as shards/shard-*.tar")
    fs, name = open_location(folder)
    pattern = last if is_pattern else name
    if pattern and not pattern.endswith(".tar"):
        raise UsageError(f"data: {display_name} is not a .tar. Give a folder of tars, or such as shards/shard-*.tar")
    if not pattern and not list_shards(fs.list_dir()):
        raise UsageError(
            f"data: {display_name} holds no .tar: `paragan data shard {display_name} TO_FOLDER` makes them"
        )
    return fs, pattern or "*.tar"
