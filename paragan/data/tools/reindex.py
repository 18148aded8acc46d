"""The index of tar shards, made anew: `paragan data index`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from paragan.core.atomic_write import aside
from paragan.core.errors import Unusable
from paragan.data.formats.tar_index import Index, build
from paragan.data.formats.webdataset import INDEX, is_pattern, shards_in, sizes_of
from paragan.data.storage.filesystem import Place, is_address, public, shown
from paragan.data.storage.local import Here
from paragan.data.storage.open_location import place_of


def refresh(where: str, out: Path | None = None, say: Callable[[str], None] | None = None) -> tuple[Index, Path]:
    """Read the shards that `where` names, and write their index: beside them, or to `out`. Says where it lies.

    Raises `Unusable` for what are no shards, and for those far away without `out`: nothing is written there.
    """
    place, pattern = _shards(where)
    kept = out or (place.path / INDEX if isinstance(place, Here) and not place.remote else None)
    if kept is None:
        named = shown(public(where))
        raise Unusable(f"{named} is far away, where nothing is written: give --out {INDEX}, and put it beside the tars")
    sizes = sizes_of(place, pattern)
    index = build(place, list(sizes), list(sizes.values()), say)
    with aside(kept) as path:
        path.write_bytes(index.to_bytes())
    return index, kept


def _shards(where: str) -> tuple[Place, str]:
    """The folder of some shards, and the pattern of their names."""
    named = shown(public(where))
    above, _, last = where.rpartition("/")
    several = is_pattern(last) and (is_address(where) or not Path(where).exists())
    folder = (f"{above}/" if above or where.startswith("/") else ".") if several else where
    if not is_address(where) and not Path(folder).exists():
        raise Unusable(f"data: {named} does not exist: give a folder of tars, or such as shards/shard-*.tar")
    place, name = place_of(folder)
    pattern = last if several else name
    if pattern and not pattern.endswith(".tar"):
        raise Unusable(f"data: {named} is no .tar: give a folder of tars, or such as shards/shard-*.tar")
    if not pattern and not shards_in(place.entries()):
        raise Unusable(f"data: {named} holds no .tar: `paragan data shard {named} TO_FOLDER` makes them")
    return place, pattern or "*.tar"
