"""The index of tar shards, made anew: `paragan data index`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError
from paragan.data.formats.tar_index import TarIndex, build_index
from paragan.data.formats.webdataset import INDEX_FILE, is_shard_pattern, list_shards, shard_sizes
from paragan.data.storage.filesystem import FileSystem, is_url, printable, redact_url
from paragan.data.storage.local import LocalFileSystem
from paragan.data.storage.open_location import open_location


def reindex(location: str, out: Path | None = None, log: Callable[[str], None] | None = None) -> tuple[TarIndex, Path]:
    """Read the shards that `where` names, and write their index: beside them, or to `out`. Says where it lies.

    Raises `Unusable` for what are no shards, and for those far away without `out`: nothing is written there.
    """
    place, pattern = _locate_shards(location)
    kept = out or (place.root / INDEX_FILE if isinstance(place, LocalFileSystem) and not place.is_remote else None)
    if kept is None:
        named = printable(redact_url(location))
        raise UsageError(
            f"{named} is far away, where nothing is written: give --out {INDEX_FILE}, and put it beside the tars"
        )
    sizes = shard_sizes(place, pattern)
    index = build_index(place, list(sizes), list(sizes.values()), log)
    with atomic_output(kept) as path:
        path.write_bytes(index.to_bytes())
    return index, kept


def _locate_shards(location: str) -> tuple[FileSystem, str]:
    """The folder of some shards, and the pattern of their names."""
    named = printable(redact_url(location))
    above, _, last = location.rpartition("/")
    several = is_shard_pattern(last) and (is_url(location) or not Path(location).exists())
    folder = (f"{above}/" if above or location.startswith("/") else ".") if several else location
    if not is_url(location) and not Path(folder).exists():
        raise UsageError(f"data: {named} does not exist: give a folder of tars, or such as shards/shard-*.tar")
    place, name = open_location(folder)
    pattern = last if several else name
    if pattern and not pattern.endswith(".tar"):
        raise UsageError(f"data: {named} is no .tar: give a folder of tars, or such as shards/shard-*.tar")
    if not pattern and not list_shards(place.list_dir()):
        raise UsageError(f"data: {named} holds no .tar: `paragan data shard {named} TO_FOLDER` makes them")
    return place, pattern or "*.tar"
