"""Image files in one folder, or in a folder for each class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import sort_class_names
from paragan.data.formats.read_span import read_span
from paragan.data.source import IMAGE_FORMATS, DecodeError, MalformedDataset
from paragan.data.storage.filesystem import ByteRange, DirListing, FileSystem, abbreviate, printable

REMOTE_THREADS = 32
MAX_SIZE_REQUESTS = 4096  # of remote files, one request each
NO_CLASS = "(no class)"  # the class of images outside of the class folders, in `paragan data inspect`


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
            yield f"{name}\0{'' if size is None else size}\n".encode(errors="surrogateescape")

    def _size(self, index: int) -> int:
        try:
            return self.fs.size(self.names[index])
        except DecodeError:  # it does not exist: reading it will report it
            return -1


def open_image_folder(fs: FileSystem, listing: DirListing, subfolder: str = "") -> ImageFolderSource:
    """Open the images of a folder, or of its folders, one for each class.

    Args:
        fs: the file system.
        listing: the contents of the folder.
        subfolder: the folder, relative to `fs`.

    Raises:
        MalformedDataset: there are images outside of the class folders, or a class has no image.
        UsageError: there is no image.
    """
    location = fs.display_path(subfolder) if subfolder else fs.location
    strays = _image_files(listing)
    if not listing.folders:
        if not strays:
            raise UsageError(_no_images_message(location, list(listing.files)))
        names = [join_path(subfolder, name) for name in strays]
        return ImageFolderSource(fs, names, None, (), _describe_ignored(listing.files, []), list(strays.values()))
    with ThreadPoolExecutor(REMOTE_THREADS if fs.is_remote else 1) as pool:
        folders = sort_class_names(listing.folders)
        listings = list(pool.map(lambda name: fs.list_dir(join_path(subfolder, name)), folders))
    images_by_folder = {name: _image_files(contents) for name, contents in zip(folders, listings)}
    if strays:
        images_by_folder[""] = strays
    files = [*listing.files, *(file for contents in listings for file in contents.files)]
    nested = [join_path(name, sub) for name, contents in zip(folders, listings) for sub in contents.folders]
    empty = [join_path(subfolder, name) for name, images in images_by_folder.items() if not images]
    empty_message = ""
    if empty:
        nested_paths = [join_path(subfolder, name) for name in nested]
        empty_message = _empty_class_message(fs, location, listing.folders, empty, files, nested_paths)
    counts = [len(images) for images in images_by_folder.values()]
    labels = np.repeat(np.arange(len(counts)), counts)  # [N] int64
    if not len(labels):
        raise UsageError(empty_message)
    names = [
        join_path(subfolder, join_path(name, file)) for name, images in images_by_folder.items() for file in images
    ]
    sizes = [size for images in images_by_folder.values() for size in images.values()]
    classes = tuple(printable(name) or NO_CLASS for name in images_by_folder)
    source = ImageFolderSource(fs, names, labels, classes, _describe_ignored(files, nested), sizes)
    if strays:
        raise MalformedDataset(_mixed_layout_message(location, len(strays), listing.folders), source)
    if empty:
        raise MalformedDataset(empty_message, source)
    return source


def join_path(folder: str, name: str) -> str:
    """Return `folder/name`, or `name` if `folder` is empty."""
    return f"{folder}/{name}" if folder else name


def _suffix(name: str) -> str:
    base = name.rsplit("/", 1)[-1]
    return base[base.rindex(".") :].lower() if "." in base.lstrip(".") else ""


def _image_files(listing: DirListing) -> dict[str, int | None]:
    return {name: size for name, size in listing.files.items() if _suffix(name) in IMAGE_FORMATS}


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
    location: str,
    folders: Sequence[str],
    empty: Sequence[str],
    files: Sequence[str],
    nested: Sequence[str],
) -> str:
    """Describe classes without image; if all have none, `location` is probably one level too high."""
    if len(empty) < len(folders):
        others = f", nor have {len(empty) - 1:,} more" if len(empty) > 1 else ""
        remedy = f"add one ({', '.join(IMAGE_FORMATS)}) or remove the folder"
        return f"data: {fs.display_path(empty[0])}: this class has no image{others}: {remedy}"
    message = f"data: {location} and its {len(folders):,} folders ({_abbreviate_paths(folders)}) hold no image"
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
