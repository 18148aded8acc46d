"""Which set of images a name means."""

from __future__ import annotations

import difflib
from pathlib import Path

from paragan.core.errors import Unusable
from paragan.data.formats.array import digits
from paragan.data.formats.cifar import cifar, is_cifar
from paragan.data.formats.dataset_json import LISTING, listed_folder
from paragan.data.formats.hdf5 import hdf5
from paragan.data.formats.hf_datasets import arrow, is_arrow
from paragan.data.formats.image_folder import extensions, folder
from paragan.data.formats.npz import read_npy, read_npz
from paragan.data.formats.webdataset import by_index, is_pattern, open_tars, shards_in
from paragan.data.formats.zip_archive import zipped
from paragan.data.source import FORMATS, Source
from paragan.data.storage.filesystem import Place, Reach, is_address, public, refuse_public, shown
from paragan.data.storage.open_location import place_of

FORMS = (
    "`digits`, an .npz, .npy, .zip or .h5, .tar shards (shard-*.tar, shard-{000..012}.tar), or a folder: of images "
    f"({', '.join(FORMATS)}), of a folder each class, of tars, of CIFAR, or one that Hugging Face `datasets` saved"
)


def find(where: str, reach: Reach | None = None, *, labels: bool = True) -> Source:
    """The set that `where` names: a word, a path, or an address. Raises `Unusable` for what is none."""
    if not where:
        raise Unusable(f"data: nothing is named: give {FORMS}")
    if where == "digits":
        return digits()
    refuse_public(where)
    far = is_address(where)
    if (far or not Path(where).exists()) and is_pattern(where):
        return _pattern(where, reach, labels)
    if not far and not Path(where).exists():
        raise Unusable(_missing(Path(where)))
    place, name = place_of(where, reach)
    return _file(place, name, reach, labels) if name else _folder(place, reach, labels)


def _pattern(where: str, reach: Reach | None, labels: bool) -> Source:
    above, _, pattern = where.rpartition("/")
    if is_pattern(above):
        raise Unusable(
            f"data: {shown(public(where))} has * or {{..}} in a folder's name: only the last name may have them"
        )
    if not is_address(where) and not Path(above or ".").is_dir():
        raise Unusable(_missing(Path(above)))
    if not pattern.lower().endswith(".tar"):
        raise Unusable(f"data: {shown(public(where))} is not about .tar files: give such as shard-*.tar, or {FORMS}")
    place, _ = place_of(f"{above}/" if above or where.startswith("/") else ".", reach)
    return open_tars(place, pattern, reach, labels=labels)


def _folder(place: Place, reach: Reach | None, labels: bool) -> Source:
    try:
        here = place.entries()
    except Unusable:
        found = by_index(place, reach, labels=labels) if place.remote else None
        if found is None:
            raise
        return found
    if is_arrow(here):
        return arrow(place, here, labels=labels)
    if LISTING in here.files:
        return listed_folder(place, here, labels=labels)
    if shards_in(here):
        return open_tars(place, "*.tar", reach, labels=labels)
    if is_cifar(here):
        return cifar(place, here, labels=labels)
    return folder(place, here)


def _file(place: Place, name: str, reach: Reach | None, labels: bool) -> Source:
    suffix, where = Path(name).suffix.lower(), place.at(name)
    if suffix == ".npz":
        return read_npz(place, name, labels=labels)
    if suffix == ".npy":
        return read_npy(place, name)
    if suffix == ".zip":
        return zipped(place, name, labels=labels)
    if suffix in (".h5", ".hdf5"):
        return hdf5(place, name, labels=labels)
    if suffix == ".tar":
        return open_tars(place, name, reach, labels=labels)
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
