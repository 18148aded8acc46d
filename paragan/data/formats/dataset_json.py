"""Labels by the name of the file, as StyleGAN and EDM keep them: dataset.json, {"labels": [["a/1.png", 6], ...]}."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from paragan.core.errors import Unusable
from paragan.data.formats.image_folder import Folder, joined
from paragan.data.formats.npz import check_labels
from paragan.data.source import FORMATS, DecodeError
from paragan.data.storage.filesystem import Entries, Place, one_line, shown

LISTING = "dataset.json"
CLASSES = "classes.json"  # names of classes, which dataset.json has not: ["cat", "dog", ...]
LARGEST = 2**29  # bytes of a dataset.json

_DEPTH = 4  # folders within folders that are looked through
_FORM = '{"labels": [["a.png", 0], ...]} or {"labels": null}'


def is_image(name: str) -> bool:
    """Whether a file is one by the end of its name. Hidden ones, and those in hidden folders, are none."""
    *folders, base = name.split("/")
    if any(part.startswith(".") or part == "__MACOSX" for part in (*folders, base)):
        return False
    return "." in base and base[base.rindex(".") :].lower() in FORMATS


def listed(data: bytes, names: Sequence[str], where: str, classes: int | None = None) -> np.ndarray | None:
    """The labels [N] int64 that a dataset.json, which messages call `where`, gives to the files `names`.

    None where it gives none. Raises `Unusable` unless it gives one to each, and to nothing else. `classes` is how many
    there are, if that is known.
    """
    found = _parsed(data, where)
    if found is None:
        return None
    missing = [name for name in names if name not in found]
    unknown = sorted(found.keys() - set(names))
    if missing or unknown:
        raise Unusable(f"data: {where} {_mismatch(missing, unknown, len(names), len(found))}")
    labels = np.array([found[name] for name in names], np.int64)
    check_labels(labels, where, classes)
    return labels


def class_names(data: bytes, where: str) -> tuple[str, ...]:
    """The names in a classes.json, which messages call `where`. Raises `Unusable` for anything else."""
    try:
        names = json.loads(data)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names) or len({*names}) < len(names):
        raise Unusable(f'data: {where} is no list of different names: write ["cat", "dog", ...]')
    return tuple(shown(name) for name in names)


def numbered(labels: np.ndarray | None) -> tuple[str, ...]:
    """Names for classes that have none: their numbers."""
    return () if labels is None else tuple(str(label) for label in range(int(labels.max()) + 1))


def named(labels: np.ndarray | None, classes: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the classes of labels: `classes`, or their numbers where there are none."""
    return () if labels is None else classes or numbered(labels)


def listed_folder(place: Place, here: Entries, *, labels: bool = True) -> Folder:
    """The images below `place`, which holds `here`, labelled by its dataset.json. Only what lies below is looked at."""
    files = dict(sorted((name, size) for name, size in _below(place, here) if is_image(name)))
    if not files:
        raise Unusable(f"data: {place.where} holds a {LISTING} but no image ({', '.join(FORMATS)}): add them")
    names, sizes = list(files), list(files.values())
    if not labels:
        return Folder(place, names, None, (), (), sizes)
    where = place.at(LISTING)
    try:
        classes = class_names(place.read(CLASSES), place.at(CLASSES)) if CLASSES in here.files else ()
        numbers = listed(place.read(LISTING), names, where, len(classes) or None)
    except DecodeError as error:
        raise Unusable(f"data: {where} cannot be read: {error}") from None
    return Folder(
        place, names, numbers, named(numbers, classes), (f"labels of {LISTING}",) * (numbers is not None), sizes
    )


def _below(place: Place, here: Entries, inside: str = "", depth: int = 0) -> Iterator[tuple[str, int | None]]:
    yield from ((joined(inside, name), size) for name, size in here.files.items())
    for folder in here.folders if depth < _DEPTH else ():
        deeper = joined(inside, folder)
        yield from _below(place, place.entries(deeper), deeper, depth + 1)


def _parsed(data: bytes, where: str) -> dict[str, int] | None:
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else one_line(error)
        raise Unusable(f"data: {where} is no JSON ({reason}); wanted {_FORM}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("labels"), list | None):
        raise Unusable(f"data: {where} is not of the form {_FORM}")
    if not whole.get("labels"):
        return None
    found: dict[str, int] = {}
    for entry in whole["labels"]:
        match entry:
            case [str(name), int(label)] if not isinstance(label, bool) and abs(label) < 2**63:
                if found.setdefault(name, label) != label:
                    raise Unusable(f"data: {where} names {shown(name)} twice, as {found[name]} and {label}: keep one")
            case _:
                text = shown(json.dumps(entry))
                raise Unusable(f'data: {where}: {text[:80]} is no pair of a name and a number, such as ["a.png", 0]')
    return found


def _mismatch(missing: Sequence[str], unknown: Sequence[str], files: int, labels: int) -> str:
    parts = [f"gives no label to {len(missing):,} of {files:,} images ({_some(missing)})"] * bool(missing)
    parts += [f"names {len(unknown):,} of {labels:,} that are not there ({_some(unknown)})"] * bool(unknown)
    return f"{' and '.join(parts)}: write it for the images that lie beside it"


def _some(names: Sequence[str]) -> str:
    return ", ".join(shown(name)[:80] for name in names[:3]) + ", ..." * (len(names) > 3)
