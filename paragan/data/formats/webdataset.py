"""WebDataset shards: images in tars, read one by one through an index."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from paragan.core.atomic_write import aside
from paragan.core.errors import Unusable
from paragan.data.formats.dataset_json import numbered
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import fetch
from paragan.data.formats.tar_index import NONE, Index, build, classes_beside, from_bytes
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import Entries, Place, Reach, Spot, shown
from paragan.data.storage.local import Here

INDEX = "paragan-index.npz"
Say = Callable[[str], None]

_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")
_MOST = 100_000  # shards
_ASKED_AT_ONCE = 16  # far shards whose size is asked for


class Tars:
    """Images in tar shards. Their checksums are those of the index, and checked."""

    whole = None

    def __init__(
        self, place: Place, index: Index, labels: np.ndarray | None, classes: tuple[str, ...], notes: tuple[str, ...]
    ):
        self.place, self.index, self.where, self.near = place, index, place.where, not place.remote
        self.labels, self.classes, self.notes = labels, classes, notes
        columns: tuple[Any, ...] = (index.shard, index.start, index.size, index.crc32)
        self._columns = tuple(map(memoryview, columns))  # which are read faster than arrays

    def __len__(self) -> int:
        return len(self.index)

    def read(self, index: int) -> bytes:
        shard, start, size, checksum = self._columns
        return fetch(self.place, self.index.shards[shard[index]], start[index], size[index], checksum[index])

    def spots(self, index: np.ndarray) -> list[Spot]:
        about = self.index
        columns = (column[index].tolist() for column in (about.shard, about.start, about.size, about.crc32))
        return [(about.shards[shard], *lies) for shard, *lies in zip(*columns)]

    def name(self, index: int) -> str:
        return _named(self.place, self.index, index)

    def identity(self) -> Iterable[bytes]:
        yield self.index.keys.tobytes()
        yield self.index.size.astype("<i8").tobytes()
        yield self.index.crc32.astype("<u4").tobytes()


def open_tars(
    place: Place,
    pattern: str,
    reach: Reach | None = None,
    *,
    labels: bool = True,
    say: Say | None = None,
    names: Sequence[str] = (),
) -> Tars:
    """The images in the shards of `place` that `pattern` names: a.tar, shard-*.tar, shard-{000..012}.tar; or `names`.

    Their index is `INDEX` beside them where it is about them as they are. Otherwise they are read once to make it, and
    it is kept there, or in the cache of `reach` if they lie far away, if that can be written.
    """
    sizes = _asked(place, names) if names else sizes_of(place, pattern)
    index, note = _index(place, sizes, reach or Reach(), say)
    notes = (f"{len(sizes):,} shard{'s' * (len(sizes) != 1)}; {note}",)
    if not labels or (index.label == NONE).all():
        return Tars(place, index, None, (), notes)
    bare = np.flatnonzero(index.label == NONE)
    if len(bare):
        raise Unusable(
            f"data: {len(bare):,} of {len(index):,} images have no class ({_named(place, index, int(bare[0]))}): "
            f"add a .cls with a number to each"
        )
    classes = classes_beside(place) or index.classes
    check_labels(index.label, place.where, len(classes) or None)
    return Tars(place, index, index.label, classes or numbered(index.label), notes)


def by_index(place: Place, reach: Reach | None = None, *, labels: bool = True) -> Tars | None:
    """The shards that the index in a folder names, where the folder itself cannot be listed; None if there is none."""
    try:
        index = from_bytes(place.read(INDEX), place.at(INDEX))
    except (DecodeError, Unusable, OSError):
        return None
    if any("/" in name or is_pattern(name) for name in index.shards):
        return None
    return open_tars(place, "*.tar", reach, labels=labels, names=index.shards)


def _named(place: Place, index: Index, row: int) -> str:
    key = bytes(index.keys[row]).decode("utf8", "replace")
    return f"{place.at(index.shards[index.shard[row]])}, {shown(key)}"


def is_pattern(name: str) -> bool:
    """Whether it names shards by `*` or {first..last}."""
    return "*" in name or _RANGE.search(name) is not None


def shards_in(here: Entries) -> list[str]:
    """The tars of a folder."""
    return [name for name in here.files if name.endswith(".tar")]


def expanded(pattern: str) -> Iterator[str]:
    """The names that {first..last} stands for; zeros in front of the first are kept."""
    match = _RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    first, last = match[1], match[2]
    if not 0 <= int(last) - int(first) < _MOST:
        raise Unusable(f"data: {shown(match[0])} is no range of 1 to {_MOST:,}: give one such as {{000..012}}")
    width = len(first) if first.startswith("0") else 0
    for number in range(int(first), int(last) + 1):
        for rest in expanded(pattern[match.end() :]):
            yield f"{pattern[: match.start()]}{number:0{width}d}{rest}"


def sizes_of(place: Place, pattern: str) -> dict[str, int]:
    """The shards that a pattern names, with their bytes."""
    itself = isinstance(place, Here) and (place.path / pattern).is_file()  # a file that is called so
    names, sizes = [pattern] if itself else list(expanded(pattern)), {}
    if "*" in pattern and not itself:
        wanted = re.compile("|".join(re.escape(name).replace(r"\*", ".*") for name in names))
        files = place.entries().files
        sizes = {name: files[name] for name in files if wanted.fullmatch(name)}
        names = list(sizes)
        if not names:
            raise Unusable(
                f"data: {place.where} holds no {shown(pattern)}: give the names that lie there, by * if many"
            )
    sizes |= _asked(place, [name for name in names if sizes.get(name) is None])
    return {name: int(sizes[name] or 0) for name in names}


def _asked(place: Place, names: Sequence[str]) -> dict[str, int]:
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        return dict(zip(names, pool.map(lambda name: _size(place, name), names)))


def _size(place: Place, name: str) -> int:
    try:
        return place.size(name)
    except (FileNotFoundError, DecodeError):
        raise Unusable(f"data: {place.at(name)} does not exist: name the shards that do, or * for all") from None


def _index(place: Place, sizes: dict[str, int], reach: Reach, say: Say | None) -> tuple[Index, str]:
    """The index of the shards, and where it is from."""
    names, lengths = list(sizes), list(sizes.values())
    kept = _kept(place, sizes, reach)
    for data, where in _written(place, kept):
        with contextlib.suppress(Unusable):  # damaged: as if there was none
            if found := from_bytes(data, where).of(names, lengths):
                return found, f"index of {where}"
    made = build(place, names, lengths, say)
    if kept is None:
        return made, "their index is made anew each time; --data.reach.cache=FOLDER would keep it"
    try:
        with aside(kept) as path:
            path.write_bytes(made.to_bytes())
    except (Unusable, OSError):
        return made, f"their index cannot be kept as {shown(kept)}, and is made anew each time"
    return made, f"index kept as {shown(kept)}"


def _written(place: Place, kept: Path | None) -> Iterator[tuple[bytes, str]]:
    """What may be their index: the file beside them, or the one that was kept."""
    with contextlib.suppress(DecodeError, OSError):
        yield place.read(INDEX), place.at(INDEX)
    if kept is not None and place.remote:
        with contextlib.suppress(OSError):
            yield kept.read_bytes(), shown(kept)


def _kept(place: Place, sizes: dict[str, int], reach: Reach) -> Path | None:
    """The file that keeps an index which had to be made."""
    if not place.remote:
        return place.path / INDEX if isinstance(place, Here) else None
    about = hashlib.sha256(repr((place.where, list(sizes.items()))).encode(errors="surrogateescape")).hexdigest()[:32]
    return Path(reach.folder).expanduser() / "indexes" / f"{about}.npz" if reach.folder else None
