"""Which set of images a name means."""

from __future__ import annotations

import difflib
from pathlib import Path

from paragan.data.decode import FORMATS
from paragan.data.places import Here, Place, Reach, is_address, place_of, shown
from paragan.data.source import Source
from paragan.data.sources.arrays import Arrays, digits
from paragan.data.sources.folder import extensions, folder
from paragan.data.sources.npz import read_npz
from paragan.errors import Unusable

FORMS = f"`digits`, an .npz, or a folder of images ({', '.join(FORMATS)})"


def find(where: str, reach: Reach | None = None, *, labels: bool = True) -> Source:
    """The set that `where` names: a word, a path, or an address. Raises `Unusable` for what is none."""
    if not where:
        raise Unusable(f"data: nothing is named: give {FORMS}")
    if where == "digits":
        return digits()
    if not is_address(where) and not Path(where).exists():
        raise Unusable(_missing(Path(where)))
    place, name = place_of(where, reach)
    return _file(place, name, labels) if name else _folder(place)


def _folder(place: Place) -> Source:
    return folder(place)


def _file(place: Place, name: str, labels: bool) -> Source:
    suffix, where = Path(name).suffix.lower(), place.at(name)
    if suffix == ".npz":
        assert isinstance(place, Here)
        stored = read_npz(place.path / name, where, labels=labels)
        notes = (f"ignored keys: {', '.join(map(shown, stored.ignored))}",) if stored.ignored else ()
        return Arrays(where, stored.images, stored.labels, stored.classes, notes)
    if suffix in FORMATS:
        raise Unusable(f"data: {where} is one image: give the folder it lies in, {place.where}")
    raise Unusable(f"data: {where} has {extensions([name])}, no format known here: give {FORMS}")


def _missing(path: Path) -> str:
    """Name what does not exist: the first part of the path that is missing, and what is there instead."""
    lost = path
    while lost.parent != lost and not lost.parent.exists():
        lost = lost.parent
    there = [shown(entry.name) for entry in lost.parent.iterdir()] if lost.parent.is_dir() else []
    near = difflib.get_close_matches(lost.name, [*there, "digits"], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"give {FORMS}"
    inside = "" if lost == path else f" (there is no {shown(lost)})"
    return f"data: {shown(path)} does not exist{inside}: {hint}"
