"""Labels by file name, as StyleGAN and EDM store them: dataset.json, {"labels": [["a/1.png", 6], ...]}."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import check_labels, resolve_class_names
from paragan.data.formats.image_folder import ImageFolderSource, join_path
from paragan.data.source import IMAGE_FORMATS, DecodeError
from paragan.data.storage.filesystem import (
    DirListing,
    FileSystem,
    abbreviate,
    format_error,
    is_litter,
    printable,
)

DATASET_JSON = "dataset.json"
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
    data: bytes, names: Sequence[str], location: str, num_classes: int | None = None
) -> np.ndarray | None:
    """Return the labels [N] int64 that a dataset.json gives to the files `names`; None if it gives none.

    Args:
        data: the contents of the file.
        names: [N] names of the images.
        location: what messages call the file.
        num_classes: if it is known.

    Raises:
        UsageError: the file is damaged, lacks a label of an image, or names other files.
    """
    label_by_name = _parse_json(data, location)
    if label_by_name is None:
        return None
    missing = [name for name in names if name not in label_by_name]
    unknown = sorted(label_by_name.keys() - set(names))
    if missing or unknown:
        raise UsageError(f"data: {location} {_mismatch_message(missing, unknown, len(names), len(label_by_name))}")
    labels = np.array([label_by_name[name] for name in names], np.int64)
    check_labels(labels, location, num_classes)
    return labels


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
    size_by_name = dict(sorted((name, size) for name, size in _walk(fs, listing) if is_image(name)))
    if not size_by_name:
        raise UsageError(
            f"data: {fs.location} holds a {DATASET_JSON} but no image ({', '.join(IMAGE_FORMATS)}): add them"
        )
    names = list(size_by_name)
    sizes = list(size_by_name.values())
    if not labels:
        return ImageFolderSource(fs, names, None, (), (), sizes)
    path = fs.display_path(DATASET_JSON)
    classes: tuple[str, ...] = ()
    try:
        if CLASSES_JSON in listing.files:
            classes = parse_class_names(fs.read(CLASSES_JSON), fs.display_path(CLASSES_JSON))
        numbers = parse_dataset_json(fs.read(DATASET_JSON), names, path, len(classes) or None)
    except DecodeError as error:
        raise UsageError(f"data: {path} cannot be read: {error}") from None
    notes = [] if numbers is None else [f"labels of {DATASET_JSON}"]
    return ImageFolderSource(fs, names, numbers, resolve_class_names(numbers, classes), notes, sizes)


def _walk(fs: FileSystem, listing: DirListing, subfolder: str = "", depth: int = 0) -> Iterator[tuple[str, int | None]]:
    """Yield the files below a folder, and their sizes where the listing tells them."""
    yield from ((join_path(subfolder, name), size) for name, size in listing.files.items())
    if depth == _MAX_DEPTH:
        return
    for name in listing.folders:
        folder = join_path(subfolder, name)
        yield from _walk(fs, fs.list_dir(folder), folder, depth + 1)


def _parse_json(data: bytes, location: str) -> dict[str, int] | None:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else format_error(error)
        raise UsageError(f"data: {location} is not JSON ({reason}); expected {_EXPECTED_FORM}") from None
    if not isinstance(content, dict) or not isinstance(content.get("labels"), list | None):
        raise UsageError(f"data: {location} is not of the form {_EXPECTED_FORM}")
    if not content.get("labels"):
        return None
    label_by_name: dict[str, int] = {}
    for entry in content["labels"]:
        match entry:
            case [str(name), int(label)] if not isinstance(label, bool) and abs(label) < 2**63:
                first = label_by_name.setdefault(name, label)
                if first != label:
                    raise UsageError(
                        f"data: {location} names {printable(name)} twice, as {first} and {label}: keep one"
                    )
            case _:
                text = printable(json.dumps(entry))
                raise UsageError(
                    f'data: {location}: {text[:80]} is not a pair of a name and a number, such as ["a.png", 0]'
                )
    return label_by_name


def _mismatch_message(missing: Sequence[str], unknown: Sequence[str], files: int, labels: int) -> str:
    problems: list[str] = []
    if missing:
        problems.append(f"gives no label to {len(missing):,} of {files:,} images ({abbreviate(missing)})")
    if unknown:
        problems.append(f"names {len(unknown):,} of {labels:,} that do not exist ({abbreviate(unknown)})")
    return f"{' and '.join(problems)}: write it for the images in its folder"
