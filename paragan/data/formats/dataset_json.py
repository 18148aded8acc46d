"""Labels by the name of the file, as StyleGAN and EDM keep them: dataset.json, {"labels": [["a/1.png", 6], ...]}."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.image_folder import ImageFolderSource, join_path
from paragan.data.formats.npz import check_labels
from paragan.data.source import IMAGE_FORMATS, DecodeError
from paragan.data.storage.filesystem import DirListing, FileSystem, format_error, printable

DATASET_JSON = "dataset.json"
CLASSES_JSON = "classes.json"  # names of classes, which dataset.json has not: ["cat", "dog", ...]
MAX_JSON_BYTES = 2**29  # bytes of a dataset.json

_MAX_DEPTH = 4  # folders within folders that are looked through
_EXPECTED_FORM = '{"labels": [["a.png", 0], ...]} or {"labels": null}'


def is_image(name: str) -> bool:
    """Whether a file is one by the end of its name. Hidden ones, and those in hidden folders, are none."""
    *folders, base = name.split("/")
    if any(part.startswith(".") or part == "__MACOSX" for part in (*folders, base)):
        return False
    return "." in base and base[base.rindex(".") :].lower() in IMAGE_FORMATS


def parse_dataset_json(
    data: bytes, names: Sequence[str], location: str, num_classes: int | None = None
) -> np.ndarray | None:
    """The labels [N] int64 that a dataset.json, which messages call `where`, gives to the files `names`.

    None where it gives none. Raises `Unusable` unless it gives one to each, and to nothing else. `classes` is how many
    there are, if that is known.
    """
    found = _parse_json(data, location)
    if found is None:
        return None
    missing = [name for name in names if name not in found]
    unknown = sorted(found.keys() - set(names))
    if missing or unknown:
        raise UsageError(f"data: {location} {_mismatch_message(missing, unknown, len(names), len(found))}")
    labels = np.array([found[name] for name in names], np.int64)
    check_labels(labels, location, num_classes)
    return labels


def parse_class_names(data: bytes, location: str) -> tuple[str, ...]:
    """The names in a classes.json, which messages call `where`. Raises `Unusable` for anything else."""
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise UsageError(f'data: {location} is no list of different names: write ["cat", "dog", ...]')
    return tuple(printable(name) for name in names)


def default_class_names(labels: np.ndarray | None) -> tuple[str, ...]:
    """Names for classes that have none: their numbers."""
    return () if labels is None else tuple(str(label) for label in range(int(labels.max()) + 1))


def resolve_class_names(labels: np.ndarray | None, classes: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes of labels: `classes`, or their numbers where there are none."""
    return () if labels is None else classes or default_class_names(labels)


def open_labelled_folder(fs: FileSystem, listing: DirListing, *, labels: bool = True) -> ImageFolderSource:
    """The images below `place`, which holds `here`, labelled by its dataset.json. Only what lies below is looked at."""
    files = dict(sorted((name, size) for name, size in _walk(fs, listing) if is_image(name)))
    if not files:
        raise UsageError(
            f"data: {fs.location} holds a {DATASET_JSON} but no image ({', '.join(IMAGE_FORMATS)}): add them"
        )
    names, sizes = list(files), list(files.values())
    if not labels:
        return ImageFolderSource(fs, names, None, (), (), sizes)
    where = fs.display_path(DATASET_JSON)
    try:
        classes = (
            parse_class_names(fs.read(CLASSES_JSON), fs.display_path(CLASSES_JSON))
            if CLASSES_JSON in listing.files
            else ()
        )
        numbers = parse_dataset_json(fs.read(DATASET_JSON), names, where, len(classes) or None)
    except DecodeError as error:
        raise UsageError(f"data: {where} cannot be read: {error}") from None
    return ImageFolderSource(
        fs,
        names,
        numbers,
        resolve_class_names(numbers, classes),
        (f"labels of {DATASET_JSON}",) * (numbers is not None),
        sizes,
    )


def _walk(fs: FileSystem, listing: DirListing, subfolder: str = "", depth: int = 0) -> Iterator[tuple[str, int | None]]:
    yield from ((join_path(subfolder, name), size) for name, size in listing.files.items())
    for folder in listing.folders if depth < _MAX_DEPTH else ():
        deeper = join_path(subfolder, folder)
        yield from _walk(fs, fs.list_dir(deeper), deeper, depth + 1)


def _parse_json(data: bytes, location: str) -> dict[str, int] | None:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else format_error(error)
        raise UsageError(f"data: {location} is no JSON ({reason}); wanted {_EXPECTED_FORM}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("labels"), list | None):
        raise UsageError(f"data: {location} is not of the form {_EXPECTED_FORM}")
    if not whole.get("labels"):
        return None
    found: dict[str, int] = {}
    for entry in whole["labels"]:
        match entry:
            case [str(name), int(label)] if not isinstance(label, bool) and abs(label) < 2**63:
                if found.setdefault(name, label) != label:
                    raise UsageError(
                        f"data: {location} names {printable(name)} twice, as {found[name]} and {label}: keep one"
                    )
            case _:
                text = printable(json.dumps(entry))
                raise UsageError(
                    f'data: {location}: {text[:80]} is no pair of a name and a number, such as ["a.png", 0]'
                )
    return found


def _mismatch_message(missing: Sequence[str], unknown: Sequence[str], files: int, labels: int) -> str:
    parts = [f"gives no label to {len(missing):,} of {files:,} images ({_abbreviate(missing)})"] * bool(missing)
    parts += [f"names {len(unknown):,} of {labels:,} that are not there ({_abbreviate(unknown)})"] * bool(unknown)
    return f"{' and '.join(parts)}: write it for the images that lie beside it"


def _abbreviate(names: Sequence[str]) -> str:
    return ", ".join(printable(name)[:80] for name in names[:3]) + ", ..." * (len(names) > 3)
