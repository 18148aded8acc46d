"""Image files in a folder, or in a folder each class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.read_span import read_span
from paragan.data.source import IMAGE_FORMATS, DecodeError, MalformedDataset
from paragan.data.storage.filesystem import ByteRange, DirListing, FileSystem, printable

REMOTE_THREADS = 32  # requests, far away
MAX_SIZE_REQUESTS = 4096  # sizes that are asked for, one by one, far away
NO_CLASS = "(no class)"  # what images beside the classes are called when they are looked at


class ImageFolderSource:
    """`PATH/<class>/*.png|jpg|...`, sub-folders in the order of their names being the labels, or `PATH/*.png`.

    names : of the files, relative to `place`;  sizes : their bytes, where the listing told
    """

    array = None

    def __init__(
        self,
        fs: FileSystem,
        names: list[str],
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: Sequence[str] = (),
        sizes: Sequence[int | None] | None = None,
    ):
        self.fs, self.names, self.location, self.is_local = fs, names, fs.location, not fs.is_remote
        self.labels, self.classes, self.notes = labels, classes, tuple(notes)
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        return read_span(self.fs, self.names[index])

    def byte_ranges(self, index: np.ndarray) -> list[ByteRange]:
        return [(self.names[one], 0, None, None) for one in index.tolist()]

    def sample_name(self, index: int) -> str:
        return self.fs.display_path(self.names[index])

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Names and sizes. Far away, of more than 4,096 sizes that must be asked for, those of an even sample."""
        sizes = list(self.sizes or [None] * len(self))
        unknown = [index for index, size in enumerate(sizes) if size is None]
        if self.fs.is_remote and len(unknown) > MAX_SIZE_REQUESTS:
            unknown = [unknown[at] for at in np.linspace(0, len(unknown) - 1, MAX_SIZE_REQUESTS).astype(np.int64)]
        with ThreadPoolExecutor(REMOTE_THREADS if self.fs.is_remote else 1) as pool:
            for index, size in zip(unknown, pool.map(self._size, unknown)):
                sizes[index] = size
        for name, size in zip(self.names, sizes):
            yield f"{name}\0{'' if size is None else size}\n".encode(errors="surrogateescape")

    def _size(self, index: int) -> int:
        try:
            return self.fs.size(self.names[index])
        except DecodeError:  # gone: `read` says so, when it is needed
            return -1


def open_image_folder(fs: FileSystem, listing: DirListing, subfolder: str = "") -> ImageFolderSource:
    """The images below `inside`, a folder of `place` that holds `here`. Raises `Unusable` for what is no such set, and
    `Odd` where some images lie beside the classes, or a class has none."""
    where = fs.display_path(subfolder) if subfolder else fs.location
    strays = _image_files(listing)
    if not listing.folders:
        if not strays:
            raise UsageError(_no_images_message(where, list(listing.files)))
        names = [join_path(subfolder, name) for name in strays]
        return ImageFolderSource(fs, names, None, (), _describe_ignored(listing.files, []), list(strays.values()))
    with ThreadPoolExecutor(REMOTE_THREADS if fs.is_remote else 1) as pool:
        within = list(pool.map(lambda name: fs.list_dir(join_path(subfolder, name)), listing.folders))
    members = [_image_files(entries) for entries in within]
    everything = [*listing.files, *(file for entries in within for file in entries.files)]
    deeper = [join_path(name, sub) for name, entries in zip(listing.folders, within) for sub in entries.folders]
    bare = [join_path(subfolder, name) for name, member in zip(listing.folders, members) if not member]
    told_bare = (
        _empty_class_message(fs, where, listing.folders, bare, everything, [join_path(subfolder, d) for d in deeper])
        if bare
        else ""
    )
    groups = [*zip(listing.folders, members), *[("", strays)] * bool(strays)]
    labels = np.repeat(np.arange(len(groups)), [len(images) for _, images in groups])  # [N] int64
    if not len(labels):
        raise UsageError(told_bare)
    names = [join_path(subfolder, join_path(name, file)) for name, images in groups for file in images]
    sizes = [size for _, images in groups for size in images.values()]
    classes = tuple(printable(name) or NO_CLASS for name, _ in groups)
    found = ImageFolderSource(fs, names, labels, classes, _describe_ignored(everything, deeper), sizes)
    if strays:
        raise MalformedDataset(_mixed_layout_message(where, len(strays), listing.folders), found)
    if bare:
        raise MalformedDataset(told_bare, found)
    return found


def join_path(folder: str, name: str) -> str:
    """The name of a file, relative to what `folder` is relative to."""
    return f"{folder}/{name}" if folder else name


def _suffix(name: str) -> str:
    base = name.rsplit("/", 1)[-1]
    return base[base.rindex(".") :].lower() if "." in base.lstrip(".") else ""


def _image_files(listing: DirListing) -> dict[str, int | None]:
    return {name: size for name, size in listing.files.items() if _suffix(name) in IMAGE_FORMATS}


def _describe_ignored(files: Iterable[str], folders: Sequence[str]) -> list[str]:
    others = [file for file in files if _suffix(file) not in IMAGE_FORMATS]
    lines = [f"ignored other files ({len(others):,}): {format_extensions(others)}"] * bool(others)
    return lines + [f"ignored folders within classes ({len(folders):,}): {_abbreviate(folders)}"] * bool(folders)


def _no_images_message(location: str, files: Sequence[str]) -> str:
    wanted = f"put {', '.join(IMAGE_FORMATS)} into it, or into a folder each class"
    if not files:
        return f"data: {location} is empty (hidden files do not count): {wanted}"
    others = f"{format_extensions(files)} ({len(files):,} file{'s' * (len(files) != 1)})"
    return f"data: {location} holds no image, only {others}: {wanted}"


def _mixed_layout_message(location: str, images: int, folders: Sequence[str]) -> str:
    return (
        f"data: {location} holds images ({images:,}) and folders ({len(folders):,}) side "
        f"by side: move the images into a folder each class, or the folders ({_abbreviate(folders)}) away"
    )


def _empty_class_message(
    fs: FileSystem,
    location: str,
    folders: Sequence[str],
    empty: Sequence[str],
    files: Sequence[str],
    deeper: Sequence[str],
) -> str:
    """Some class has no image; or all have none, and the folder probably is a level too high."""
    if len(empty) < len(folders):
        others = f", like {len(empty) - 1:,} more" if len(empty) > 1 else ""
        remedy = f"add one ({', '.join(IMAGE_FORMATS)}) or remove the folder"
        return f"data: {fs.display_path(empty[0])}: this class has no image{others}: {remedy}"
    within = f"data: {location} and its {len(folders):,} folders ({_abbreviate(folders)}) hold no image"
    if deeper:
        return f"{within}, only more folders: give one of them, such as {fs.display_path(deeper[0].rpartition('/')[0])}"
    return f"{within}{f', only {format_extensions(files)}' if files else ''}: put {', '.join(IMAGE_FORMATS)} into them"


def format_extensions(files: Iterable[str]) -> str:
    """The kinds of some files, for messages."""
    return ", ".join(sorted({printable(_suffix(file)) or "(no extension)" for file in files})[:10])


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(printable(name.rsplit("/", 1)[-1]) for name in names[:3]) + ", ..." * (len(names) > 3)
