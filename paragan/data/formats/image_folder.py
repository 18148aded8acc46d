"""Image files in a folder, or in a folder each class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paragan.core.errors import Unusable
from paragan.data.formats.read_span import fetch
from paragan.data.source import FORMATS, DecodeError, Odd
from paragan.data.storage.filesystem import Entries, Place, Spot, shown

AT_ONCE = 32  # requests, far away
ASKED = 4096  # sizes that are asked for, one by one, far away
STRAY = "(no class)"  # what images beside the classes are called when they are looked at


class Folder:
    """`PATH/<class>/*.png|jpg|...`, sub-folders in the order of their names being the labels, or `PATH/*.png`.

    names : of the files, relative to `place`;  sizes : their bytes, where the listing told
    """

    whole = None

    def __init__(
        self,
        place: Place,
        names: list[str],
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: Sequence[str] = (),
        sizes: Sequence[int | None] | None = None,
    ):
        self.place, self.names, self.where, self.near = place, names, place.where, not place.remote
        self.labels, self.classes, self.notes = labels, classes, tuple(notes)
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return fetch(self.place, self.names[index])

    def spots(self, index: np.ndarray) -> list[Spot]:
        return [(self.names[one], 0, None, None) for one in index.tolist()]

    def name(self, index: int) -> str:
        return self.place.at(self.names[index])

    def identity(self) -> Iterable[bytes]:
        """Names and sizes. Far away, of more than 4,096 sizes that must be asked for, those of an even sample."""
        sizes = list(self.sizes or [None] * len(self))
        unknown = [index for index, size in enumerate(sizes) if size is None]
        if self.place.remote and len(unknown) > ASKED:
            unknown = [unknown[at] for at in np.linspace(0, len(unknown) - 1, ASKED).astype(np.int64)]
        with ThreadPoolExecutor(AT_ONCE if self.place.remote else 1) as pool:
            for index, size in zip(unknown, pool.map(self._size, unknown)):
                sizes[index] = size
        for name, size in zip(self.names, sizes):
            yield f"{name}\0{'' if size is None else size}\n".encode(errors="surrogateescape")

    def _size(self, index: int) -> int:
        try:
            return self.place.size(self.names[index])
        except DecodeError:  # gone: `read` says so, when it is needed
            return -1


def folder(place: Place, here: Entries, inside: str = "") -> Folder:
    """The images below `inside`, a folder of `place` that holds `here`. Raises `Unusable` for what is no such set, and
    `Odd` where some images lie beside the classes, or a class has none."""
    where = place.at(inside) if inside else place.where
    strays = _images(here)
    if not here.folders:
        if not strays:
            raise Unusable(_nothing(where, list(here.files)))
        names = [joined(inside, name) for name in strays]
        return Folder(place, names, None, (), _ignored(here.files, []), list(strays.values()))
    with ThreadPoolExecutor(AT_ONCE if place.remote else 1) as pool:
        within = list(pool.map(lambda name: place.entries(joined(inside, name)), here.folders))
    members = [_images(entries) for entries in within]
    everything = [*here.files, *(file for entries in within for file in entries.files)]
    deeper = [joined(name, sub) for name, entries in zip(here.folders, within) for sub in entries.folders]
    bare = [joined(inside, name) for name, member in zip(here.folders, members) if not member]
    told_bare = _bare(place, where, here.folders, bare, everything, [joined(inside, d) for d in deeper]) if bare else ""
    groups = [*zip(here.folders, members), *[("", strays)] * bool(strays)]
    labels = np.repeat(np.arange(len(groups)), [len(images) for _, images in groups])  # [N] int64
    if not len(labels):
        raise Unusable(told_bare)
    names = [joined(inside, joined(name, file)) for name, images in groups for file in images]
    sizes = [size for _, images in groups for size in images.values()]
    classes = tuple(shown(name) or STRAY for name, _ in groups)
    found = Folder(place, names, labels, classes, _ignored(everything, deeper), sizes)
    if strays:
        raise Odd(_stray(where, len(strays), here.folders), found)
    if bare:
        raise Odd(told_bare, found)
    return found


def joined(folder: str, name: str) -> str:
    """The name of a file, relative to what `folder` is relative to."""
    return f"{folder}/{name}" if folder else name


def _suffix(name: str) -> str:
    base = name.rsplit("/", 1)[-1]
    return base[base.rindex(".") :].lower() if "." in base.lstrip(".") else ""


def _images(entries: Entries) -> dict[str, int | None]:
    return {name: size for name, size in entries.files.items() if _suffix(name) in FORMATS}


def _ignored(files: Iterable[str], folders: Sequence[str]) -> list[str]:
    others = [file for file in files if _suffix(file) not in FORMATS]
    lines = [f"ignored other files ({len(others):,}): {extensions(others)}"] * bool(others)
    return lines + [f"ignored folders within classes ({len(folders):,}): {_some(folders)}"] * bool(folders)


def _nothing(where: str, files: Sequence[str]) -> str:
    wanted = f"put {', '.join(FORMATS)} into it, or into a folder each class"
    if not files:
        return f"data: {where} is empty (hidden files do not count): {wanted}"
    others = f"{extensions(files)} ({len(files):,} file{'s' * (len(files) != 1)})"
    return f"data: {where} holds no image, only {others}: {wanted}"


def _stray(where: str, images: int, folders: Sequence[str]) -> str:
    return (
        f"data: {where} holds images ({images:,}) and folders ({len(folders):,}) side "
        f"by side: move the images into a folder each class, or the folders ({_some(folders)}) away"
    )


def _bare(
    place: Place, where: str, folders: Sequence[str], bare: Sequence[str], files: Sequence[str], deeper: Sequence[str]
) -> str:
    """Some class has no image; or all have none, and the folder probably is a level too high."""
    if len(bare) < len(folders):
        others = f", like {len(bare) - 1:,} more" if len(bare) > 1 else ""
        remedy = f"add one ({', '.join(FORMATS)}) or remove the folder"
        return f"data: {place.at(bare[0])}: this class has no image{others}: {remedy}"
    within = f"data: {where} and its {len(folders):,} folders ({_some(folders)}) hold no image"
    if deeper:
        return f"{within}, only more folders: give one of them, such as {place.at(deeper[0].rpartition('/')[0])}"
    return f"{within}{f', only {extensions(files)}' if files else ''}: put {', '.join(FORMATS)} into them"


def extensions(files: Iterable[str]) -> str:
    """The kinds of some files, for messages."""
    return ", ".join(sorted({shown(_suffix(file)) or "(no extension)" for file in files})[:10])


def _some(names: Sequence[str]) -> str:
    return ", ".join(shown(name.rsplit("/", 1)[-1]) for name in names[:3]) + ", ..." * (len(names) > 3)
