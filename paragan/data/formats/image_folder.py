"""Image files in one folder, or in a folder for each class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from paragan.data.formats.class_labels import sort_class_names, to_nfc
from paragan.data.formats.label_files import ImageFiles, is_label_table, read_label_files
from paragan.data.formats.read_span import read_span
from paragan.data.source import IMAGE_FORMATS, DecodeError, LabelChoice, MalformedDataset, NoImagesError
from paragan.data.storage.filesystem import ByteRange, DirListing, FileSystem, abbreviate, printable

REMOTE_THREADS = 32
MAX_SIZE_REQUESTS = 4096  # of remote files, one request each
NO_CLASS = "(no class)"  # the class of images outside of the class folders, in `paragan data inspect`
T = TypeVar("T")


class ImageFolderSource:
    """`PATH/<class>/*.png|jpg|...`, labelled by the order of the folder names, or `PATH/*.png` without labels.

    Args:
        fs: the folder.
        names: [N] of the files, relative to it.
        labels: [N] int64, or None.
        classes: [K] names.
        notes: lines for `describe`.
        sizes: [N] in bytes, None where the listing did not tell.
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
        self.fs = fs
        self.names = names
        self.location = fs.location
        self.is_local = not fs.is_remote
        self.labels = labels
        self.classes = classes
        self.notes = tuple(notes)
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.names)

    def read(self, index: int) -> bytes:
        """Return the file of image `index`."""
        return read_span(self.fs, self.names[index])

    def byte_ranges(self, index: np.ndarray) -> list[ByteRange]:
        """Return the whole files of the images `index` [n]."""
        return [(self.names[i], 0, None, None) for i in index.tolist()]

    def sample_name(self, index: int) -> str:
        """Return the path or address of image `index`."""
        return self.fs.display_path(self.names[index])

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names and sizes; of a large remote folder the sizes of MAX_SIZE_REQUESTS files, evenly spaced."""
        sizes = list(self.sizes or [None] * len(self))
        unknown = [index for index, size in enumerate(sizes) if size is None]
        if self.fs.is_remote and len(unknown) > MAX_SIZE_REQUESTS:
            positions = np.linspace(0, len(unknown) - 1, MAX_SIZE_REQUESTS).astype(np.int64)
            unknown = [unknown[position] for position in positions]
        with ThreadPoolExecutor(REMOTE_THREADS if self.fs.is_remote else 1) as pool:
            for index, size in zip(unknown, pool.map(self._size, unknown)):
                sizes[index] = size
        for name, size in zip(self.names, sizes):
            yield f"{to_nfc(name)}\0{'' if size is None else size}\n".encode(errors="surrogateescape")

    def _size(self, index: int) -> int:
        try:
            return self.fs.size(self.names[index])
        except DecodeError:  # it does not exist: reading it will report it
            return -1


@dataclass(frozen=True)
class OuterFolder:
    """A folder around the folder of the images.

    name : of the inner folder, with a slash
    used : gets the files that hold labels
    """

    fs: FileSystem
    listing: DirListing
    name: str
    used: set[str] = field(default_factory=set)


def open_image_folder(
    fs: FileSystem, listing: DirListing, *, labels: LabelChoice = True, outer: Sequence[OuterFolder] = ()
) -> ImageFolderSource:
    """Open the images of a folder, or of its folders, one for each class.

    Files beside the images may hold labels (`label_files`).

    Args:
        fs: the file system.
        listing: the contents of the folder.
        labels: whether to read labels, or the column of a table that holds them.
        outer: the folders around it, from the outermost on; a table in them may hold the labels.

    Raises:
        MalformedDataset: there are images outside of the class folders, or a class has no image.
        UsageError: there is no image, or files that look like labels cannot be read.
    """
    strays = _image_files(listing)
    if not listing.folders:
        if not strays:
            raise NoImagesError(_no_images_message(fs.location, list(listing.files)))
        source = ImageFolderSource(fs, list(strays), None, (), (), list(strays.values()))
        return _with_label_files(source, list(listing.files), [], labels, outer)
    with ThreadPoolExecutor(REMOTE_THREADS if fs.is_remote else 1) as pool:
        folders = listing.folders
        listings = list(pool.map(fs.list_dir, folders))
    class_names = sort_class_names({to_nfc(name) for name in folders})
    sizes_by_class: dict[str, dict[str, int | None]] = {name: {} for name in class_names}
    for name, contents in zip(folders, listings):
        images = {join_path(name, file): size for file, size in _image_files(contents).items()}
        sizes_by_class[to_nfc(name)] |= images
    empty = [name for name, images in sizes_by_class.items() if not images]
    if strays:
        sizes_by_class[""] = strays
    files = list(listing.files)
    files += [join_path(name, file) for name, contents in zip(folders, listings) for file in contents.files]
    nested = [join_path(name, sub) for name, contents in zip(folders, listings) for sub in contents.folders]
    empty_message = _empty_class_message(fs, listing.folders, empty, files, nested) if empty else ""
    counts = [len(images) for images in sizes_by_class.values()]
    numbers = np.repeat(np.arange(len(counts)), counts)  # [N] int64
    if not len(numbers):
        raise NoImagesError(empty_message)
    sizes = {name: images[name] for images in sizes_by_class.values() for name in sorted(images, key=to_nfc)}
    classes = tuple(printable(name) or NO_CLASS for name in sizes_by_class)
    source = ImageFolderSource(
        fs, list(sizes), numbers, classes, _describe_ignored(files, nested), list(sizes.values())
    )
    if strays:
        raise MalformedDataset(_mixed_layout_message(fs.location, len(strays), listing.folders), source)
    if empty:
        raise MalformedDataset(empty_message, source)
    return _with_label_files(source, files, nested, labels, outer)


def _with_label_files(
    source: ImageFolderSource,
    files: Sequence[str],
    nested: Sequence[str],
    labels: LabelChoice,
    outer: Sequence[OuterFolder],
) -> ImageFolderSource:
    """Return images with the labels of files beside them, if there are any, and notes on what was ignored.

    files: all files of the folder. nested: folders within its classes.
    """
    fs = source.fs
    names = {name: (fs, name) for name in files if _suffix(name) not in IMAGE_FORMATS}
    prefix = ""
    for level in reversed(outer):
        names = {level.name + path: place for path, place in names.items()}
        names |= {name: (level.fs, name) for name in level.listing.files if is_label_table(name)}
        prefix = level.name + prefix

    def read(selected: Sequence[str]) -> list[bytes]:
        places = [names[name] for name in selected]
        return map_reads(lambda place: place[0].read(place[1]), places, fs.is_remote)

    location = outer[0].fs.location if outer else fs.location
    images = ImageFiles(
        location, [prefix + name for name in source.names], list(names), read, source.labels is not None, prefix
    )
    file_labels = read_label_files(images, labels)
    ignored = set(files)
    notes: list[str] = []
    if file_labels:
        source.labels = file_labels.labels
        source.classes = file_labels.classes
        for name in file_labels.files:
            place, file = names[name]
            if place is fs:
                ignored.discard(file)
            for level in outer:
                if place is level.fs:
                    level.used.add(file)
        notes.append(file_labels.note)
    source.notes = (*notes, *_describe_ignored(sorted(ignored), nested))
    return source


def map_reads(read: Callable[[T], bytes], items: Iterable[T], is_remote: bool) -> list[bytes]:
    """Return what `read` returns for each item, with many requests at once if each takes one."""
    if not is_remote:
        return [read(item) for item in items]
    with ThreadPoolExecutor(REMOTE_THREADS) as pool:
        return list(pool.map(read, items))


def join_path(folder: str, name: str) -> str:
    """Return `folder/name`, or `name` if `folder` is empty."""
    return f"{folder}/{name}" if folder else name


def _suffix(name: str) -> str:
    base = name.rsplit("/", 1)[-1]
    return base[base.rindex(".") :].lower() if "." in base.lstrip(".") else ""


def _image_files(listing: DirListing) -> dict[str, int | None]:
    images = [name for name in listing.files if _suffix(name) in IMAGE_FORMATS]
    return {name: listing.files[name] for name in sorted(images, key=to_nfc)}


def _describe_ignored(files: Iterable[str], folders: Sequence[str]) -> list[str]:
    lines: list[str] = []
    others = [file for file in files if _suffix(file) not in IMAGE_FORMATS]
    if others:
        lines.append(f"ignored other files ({len(others):,}): {format_extensions(others)}")
    if folders:
        lines.append(f"ignored folders within classes ({len(folders):,}): {_abbreviate_paths(folders)}")
    return lines


def _no_images_message(location: str, files: Sequence[str]) -> str:
    remedy = f"put {', '.join(IMAGE_FORMATS)} into it, or into a folder for each class"
    if not files:
        return f"data: {location} is empty (hidden files do not count): {remedy}"
    unit = "file" if len(files) == 1 else "files"
    return f"data: {location} holds no image, only {format_extensions(files)} ({len(files):,} {unit}): {remedy}"


def _mixed_layout_message(location: str, images: int, folders: Sequence[str]) -> str:
    return (
        f"data: {location} holds images ({images:,}) and folders ({len(folders):,}) side by side: "
        f"move the images into a folder for each class, or the folders ({_abbreviate_paths(folders)}) away"
    )


def _empty_class_message(
    fs: FileSystem,
    folders: Sequence[str],
    empty: Sequence[str],
    files: Sequence[str],
    nested: Sequence[str],
) -> str:
    """Describe classes without image; if all have none, the folder is probably one level too high."""
    if len(empty) < len(folders):
        others = f", nor have {len(empty) - 1:,} more" if len(empty) > 1 else ""
        remedy = f"add one ({', '.join(IMAGE_FORMATS)}) or remove the folder"
        return f"data: {fs.display_path(empty[0])}: this class has no image{others}: {remedy}"
    message = f"data: {fs.location} and its {len(folders):,} folders ({_abbreviate_paths(folders)}) hold no image"
    if nested:
        example = fs.display_path(nested[0].rpartition("/")[0])
        return f"{message}, only more folders: give one of them, such as {example}"
    only = f", only {format_extensions(files)}" if files else ""
    return f"{message}{only}: put {', '.join(IMAGE_FORMATS)} into them"


def format_extensions(files: Iterable[str]) -> str:
    """Return the extensions of files, at most ten, for messages."""
    return ", ".join(sorted({printable(_suffix(file)) or "(no extension)" for file in files})[:10])


def _abbreviate_paths(paths: Sequence[str]) -> str:
    return abbreviate([path.rsplit("/", 1)[-1] for path in paths])
