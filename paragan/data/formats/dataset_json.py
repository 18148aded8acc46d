"""Labels by file name, as StyleGAN and EDM store them: dataset.json, {"labels": [["a/1.png", 6], ...]}."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import check_labels, resolve_class_names, to_nfc, unknown_class_error
from paragan.data.formats.image_folder import ImageFolderSource, join_path
from paragan.data.formats.label_files import DATASET_JSON
from paragan.data.formats.sample_label import Label, label_of_value, number_labels
from paragan.data.source import IMAGE_FORMATS, DecodeError
from paragan.data.storage.filesystem import (
    DirListing,
    FileSystem,
    abbreviate,
    format_error,
    is_litter,
    printable,
)

CLASSES_JSON = "classes.json"  # names of the classes, which dataset.json lacks: ["cat", "dog", ...]
MAX_JSON_BYTES = 2**29  # of a dataset.json

_MAX_DEPTH = 4  # of folders that are searched
_EXPECTED_FORM = '{"labels": [["a.png", 0], ...]} or {"labels": null}'


def is_image(name: str) -> bool:
    """Return whether a file is an image by its extension. Hidden files and files of hidden folders do not count."""
    *folders, base = name.split("/")
    if any(map(is_litter, (*folders, base))):
        return False
    return "." in base and base[base.rindex(".") :].lower() in IMAGE_FORMATS


def parse_dataset_json(
    data: bytes, names: Sequence[str], location: str, classes: tuple[str, ...] = ()
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the labels [N] int64 that a dataset.json gives to the files `names`, and their names; None and () without.

    Args:
        data: the contents of the file.
        names: [N] names of the images.
        location: what messages call the file.
        classes: [K] names of the classes; without them labels that are names count, else their numbers.

    Raises:
        UsageError: the file is damaged, lacks a label of an image, or names other files.
    """
    label_by_name = _parse_json(data, location)
    if label_by_name is None:
        return None, ()
    names = [to_nfc(name) for name in names]
    missing = [name for name in names if name not in label_by_name]
    unknown = sorted(label_by_name.keys() - set(names))
    if missing or unknown:
        raise UsageError(f"data: {location} {_mismatch_message(missing, unknown, len(names), len(label_by_name))}")
    numbers, label_names = number_labels([label_by_name[name] for name in names], names, -1)
    labels = np.array(numbers, np.int64)
    if label_names and classes:
        if unknown := [name for name in label_names if name not in classes]:
            raise unknown_class_error(unknown[0], location, CLASSES_JSON)
        labels = np.array([classes.index(name) for name in label_names], np.int64)[labels]
    classes = classes or label_names
    check_labels(labels, location, len(classes) or None)
    return labels, resolve_class_names(labels, tuple(map(printable, classes)))


def parse_class_names(data: bytes, location: str) -> tuple[str, ...]:
    """Return the names in a classes.json, which messages call `location`.

    Raises:
        UsageError: it is not a list of unique names.
    """
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise UsageError(f'data: {location} is not a list of unique names. Write ["cat", "dog", ...]')
    return tuple(printable(name) for name in names)


def open_labelled_folder(fs: FileSystem, listing: DirListing, *, labels: bool = True) -> ImageFolderSource:
    """Open the images below a folder with a dataset.json, which labels them.

    Args:
        fs: the folder.
        listing: its contents.
        labels: whether to read the labels.

    Raises:
        UsageError: there is no image, or dataset.json or classes.json do not fit.
    """
    images = [(name, size) for name, size in _walk(fs, listing) if is_image(name)]
    size_by_name = dict(sorted(images, key=lambda image: to_nfc(image[0])))
    if not size_by_name:
        raise UsageError(
            f"data: {fs.location} holds a {DATASET_JSON} but no image ({', '.join(IMAGE_FORMATS)}): add them"
        )
    names = list(size_by_name)
    sizes = list(size_by_name.values())
    if not labels:
        return ImageFolderSource(fs, names, None, (), (), sizes)
    classes: tuple[str, ...] = ()
    if CLASSES_JSON in listing.files:
        classes = parse_class_names(_read(fs, CLASSES_JSON), fs.display_path(CLASSES_JSON))
    numbers, classes = parse_dataset_json(_read(fs, DATASET_JSON), names, fs.display_path(DATASET_JSON), classes)
    notes = [] if numbers is None else [f"labels of {DATASET_JSON}"]
    return ImageFolderSource(fs, names, numbers, classes, notes, sizes)


def _read(fs: FileSystem, name: str) -> bytes:
    try:
        return fs.read(name)
    except DecodeError as error:
        raise UsageError(
            f"data: {fs.display_path(name)} cannot be read: {error}. Write it again, or use --data.labels=false"
        ) from None


def _walk(fs: FileSystem, listing: DirListing, subfolder: str = "", depth: int = 0) -> Iterator[tuple[str, int | None]]:
    """Yield the files below a folder, and their sizes where the listing tells them."""
    yield from ((join_path(subfolder, name), size) for name, size in listing.files.items())
    if depth == _MAX_DEPTH:
        return
    for name in listing.folders:
        folder = join_path(subfolder, name)
        yield from _walk(fs, fs.list_dir(folder), folder, depth + 1)


def _parse_json(data: bytes, location: str) -> dict[str, Label] | None:
    """Return labels by name; None if `labels` is null or empty."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else format_error(error)
        raise UsageError(
            f"data: {location} is not JSON ({reason}); expected {_EXPECTED_FORM}; or use --data.labels=false"
        ) from None
    if not isinstance(content, dict) or not isinstance(content.get("labels", 0), list | dict | None):
        raise UsageError(
            f"data: {location} is not of the form {_EXPECTED_FORM}. Write it so, or use --data.labels=false"
        )
    entries = content["labels"] or []
    if isinstance(entries, dict):
        entries = [[name, label] for name, label in entries.items()]
    label_by_name: dict[str, Label] = {}
    for entry in entries:
        match entry:
            case [str(name), value] if (label := label_of_value(value)) is not None:
                first = label_by_name.setdefault(to_nfc(name), label)
                if first != label:
                    raise UsageError(
                        f"data: {location} names {printable(name)} twice, as {printable(str(first))} and "
                        f"{printable(str(label))}: keep one"
                    )
            case _:
                text = printable(json.dumps(entry))
                raise UsageError(
                    f'data: {location}: {text[:80]} is not a pair of a name and a class, such as ["a.png", 0]. Write '
                    "it so, or use --data.labels=false"
                )
    return label_by_name or None


def _mismatch_message(missing: Sequence[str], unknown: Sequence[str], files: int, labels: int) -> str:
    problems: list[str] = []
    if missing:
        problems.append(f"gives no label to {len(missing):,} of {files:,} images ({abbreviate(missing)})")
    if unknown:
        problems.append(f"names {len(unknown):,} of {labels:,} that do not exist ({abbreviate(unknown)})")
    return f"{' and '.join(problems)}: write it for the images in its folder"
