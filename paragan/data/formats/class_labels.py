"""Checks and names of class labels, shared by all formats."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.source import LabelChoice
from paragan.data.storage.filesystem import abbreviate, printable

LABEL_KEYS = ("labels", "label", "y", "y_train", "targets", "target", "class")  # of arrays in one file
TWO_LEVELS = ("coarse_label", "fine_label")  # of classes, as CIFAR-100 has them: neither is the usual one


def choose_label_key(keys: Collection[str], labels: LabelChoice, location: str) -> str | None:
    """Return the key under which a file of arrays holds its labels; None without labels.

    Args:
        keys: those of the file.
        labels: whether to read them, or the key.
        location: what messages call the file.

    Raises:
        UsageError: there is no such key, several could be meant, or one of another name looks like labels.
    """
    if isinstance(labels, str):
        return require_label_key(keys, labels, location)
    if not labels:
        return None
    if LABEL_KEYS[0] in keys:
        return LABEL_KEYS[0]
    usual = sorted(key for key in keys if key.lower() in LABEL_KEYS)
    levels = sorted(key for key in keys if key.lower() in TWO_LEVELS)
    if len(levels) > 1 and {"label", "labels"}.isdisjoint(map(str.lower, usual)):
        raise ambiguous_labels_error(levels, location)
    if len(usual) > 1:
        raise ambiguous_labels_error(usual, location)
    if usual:
        return usual[0]
    similar = sorted(key for key in keys if _resembles_labels(key))
    if len(similar) > 1:
        raise ambiguous_labels_error(similar, location)
    if similar:
        name = printable(similar[0])
        raise UsageError(
            f"data: {location} has no {LABEL_KEYS[0]}, but {name}. Use --data.label_key={name} if these are the "
            "labels, or --data.labels=false"
        )
    return None


def _resembles_labels(key: str) -> bool:
    return "label" in key.lower() or bool(difflib.get_close_matches(key.lower(), LABEL_KEYS[:2], cutoff=0.8))


def require_label_key(keys: Collection[str], key: str, location: str) -> str:
    """Return `key` if it is among the keys of a file or its columns.

    Raises:
        UsageError: it is not.
    """
    if key not in keys:
        raise UsageError(
            f"data.label_key={printable(key)}: {location} has only {abbreviate(sorted(keys), 10) or 'nothing'}. "
            "Use one of them"
        )
    return key


def no_label_key_error(key: str, location: str) -> UsageError:
    """Return the error for a key of labels where they have one place only."""
    return UsageError(
        f"data.label_key={printable(key)}: {location} has no keys or columns to choose from. Leave it out"
    )


def ambiguous_labels_error(keys: Sequence[str], location: str) -> UsageError:
    """Return the error for several keys or columns that may hold the labels."""
    return UsageError(
        f"data: {location} has several labels ({abbreviate(keys, 10)}). Choose with "
        f"--data.label_key={printable(keys[0])}, or use --data.labels=false"
    )


def unknown_class_error(name: str, location: str, holder: str) -> UsageError:
    """Return the error for a label that is the name of no class. holder: what holds the names of the classes."""
    return UsageError(
        f"data: {location}: label {printable(name)} is not in {holder}. Add it, or use --data.labels=false"
    )


def check_labels(labels: np.ndarray, location: str, num_classes: int | None) -> None:
    """Check that labels [N] lie in 0..num_classes-1; without num_classes, that every class up to the largest occurs.

    Args:
        labels: [N] integers.
        location: what messages call them.
        num_classes: if it is known.

    Raises:
        UsageError: they do not fit.
    """
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0:
        count = int((labels < 0).sum())
        raise UsageError(f"data: {location}: {count:,} of {len(labels):,} labels are negative ({lowest}): count from 0")
    if num_classes is not None:
        if highest >= num_classes:
            raise UsageError(
                f"data: {location}: label {highest} but {num_classes} classes: labels must lie in 0..{num_classes - 1}"
            )
        return
    present = np.unique(labels)
    if missing := highest + 1 - len(present):
        candidates = np.arange(min(highest + 1, len(present) + 5))  # holds the first five, however large the labels
        first = ", ".join(str(label) for label in np.setdiff1d(candidates, present)[:5])
        raise UsageError(
            f"data: {location}: labels go up to {highest}, but {missing:,} of these classes have no image "
            f"({first}{', ...' if missing > 5 else ''}): "
            f"renumber with np.unique(labels, return_inverse=True)[1]"
        )


def to_nfc(name: str) -> str:
    """Return a name in one form of Unicode: macOS writes e and its accent as two characters, others as one."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def sort_class_names(names: Iterable[str]) -> list[str]:
    """Return class names in the order of their labels: by value if all are numbers (2 before 10), else by name."""
    names = sorted(names)
    if all(name.isascii() and name.isdecimal() for name in names):
        names.sort(key=int)
    return names


def default_class_names(labels: np.ndarray) -> tuple[str, ...]:
    """Return the numbers of the classes as their names."""
    return tuple(str(label) for label in range(int(labels.max()) + 1))


def resolve_class_names(labels: np.ndarray | None, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the classes: `classes` if there are any, else their numbers; () without labels."""
    if labels is None:
        return ()
    return classes or default_class_names(labels)


def sort_by_folder(names: Iterable[str]) -> list[str]:
    """Return names of images in the order in which a folder of class folders is read: by class, then by name."""
    names = sorted(names, key=to_nfc)
    folders = [to_nfc(name).split("/")[:-1] for name in names]
    if len({(len(parts), *parts[:-1]) for parts in folders}) > 1:
        return names  # these folders are no classes
    classes = sort_class_names({"/".join(parts[-1:]) for parts in folders})
    rank = {name: number for number, name in enumerate(classes)}
    return sorted(names, key=lambda name: rank[to_nfc(name).split("/")[-2] if "/" in name else ""])


def labels_from_folders(names: Sequence[str], location: str, remedy: str) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return labels by the folder of each file, and the names of the folders; none if files are in no folder.

    A folder around all others is no class.

    Args:
        names: [N] of the images.
        location: what messages call their container.
        remedy: what to do if their folders are no classes.

    Raises:
        UsageError: there are folders within folders.
    """
    folders_by_image = [to_nfc(name).split("/")[:-1] for name in names]
    depth = len(folders_by_image[0])
    for name, folders in zip(names, folders_by_image):
        if len(folders) != depth:
            raise UsageError(
                f"data: {location} holds images at different depths ({printable(names[0])}, {printable(name)}): "
                f"put all of them into a folder for each class, or {remedy}"
            )
    if depth > 1 and len({tuple(folders[:-1]) for folders in folders_by_image}) > 1:
        raise UsageError(
            f"data: {location} holds folders within folders ({printable(names[0])}): "
            f"keep one level, a folder for each class, or {remedy}"
        )
    if len({tuple(folders) for folders in folders_by_image}) == 1:
        return None, ()
    classes = sort_class_names({folders[-1] for folders in folders_by_image})
    label_by_name = {name: label for label, name in enumerate(classes)}
    labels = np.array([label_by_name[folders[-1]] for folders in folders_by_image], np.int64)
    return labels, tuple(map(printable, classes))
