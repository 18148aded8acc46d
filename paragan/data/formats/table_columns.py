"""Choose the columns of a table that hold images and class labels, and number the labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import (
    TWO_LEVELS,
    ambiguous_labels_error,
    check_labels,
    default_class_names,
    require_label_key,
)
from paragan.data.formats.sample_label import label_of_value, number_labels
from paragan.data.source import LabelChoice
from paragan.data.storage.filesystem import abbreviate, printable

_IMAGE_COLUMNS = ("image", "img")  # decide between several columns of images
_LABEL_COLUMNS = (  # decide between several columns of classes
    *("label", "labels", "fine_label", "class", "class_name", "category", "cls", "target"),
)
_UNTYPED_LABEL_COLUMNS = (*_LABEL_COLUMNS, "class_id", "label_id", "targets", "y", "coarse_label")  # if none has a type


def choose_image_column(kinds: Mapping[str, str], location: str) -> str:
    """Return the column of images. kinds: names of columns -> Image, ClassLabel or another type of `datasets`."""
    columns = [name for name, kind in kinds.items() if kind == "Image"]
    if not columns:
        raise UsageError(
            f"data: {location} has no column of images, only {_format_columns(kinds)}: cast one to datasets.Image()"
        )
    if len(columns) == 1:
        return columns[0]
    for name in _IMAGE_COLUMNS:
        if name in columns:
            return name
    raise UsageError(
        f"data: {location} has several columns of images ({_format_columns(kinds)}): call one of them image"
    )


def choose_label_column(kinds: Mapping[str, str], labels: LabelChoice, location: str) -> str | None:
    """Return the column of class labels: the one that is asked for, else a ClassLabel, else one with a usual name."""
    if isinstance(labels, str):
        return require_label_key(list(kinds), labels, location)
    if not labels:
        return None
    columns = [name for name, kind in kinds.items() if kind == "ClassLabel"]
    if len(columns) == 1:
        return columns[0]
    candidates = {name.lower(): name for name in reversed(columns or list(kinds))}
    names = _LABEL_COLUMNS if columns else _UNTYPED_LABEL_COLUMNS
    usual = [candidates[name] for name in names if name in candidates]
    if columns and not usual:
        raise ambiguous_labels_error(columns, location)
    if candidates.keys() >= {*TWO_LEVELS} and candidates.keys().isdisjoint(_LABEL_COLUMNS[:2]):
        raise ambiguous_labels_error([candidates[name] for name in TWO_LEVELS], location)
    return usual[0] if usual else None


def number_label_column(
    values: Any, names: Sequence[str] | None, column: str, location: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the labels [N] int64 of an Arrow column, and the names of the classes.

    names: of the classes that numbers in the column mean, if they are known.
    """
    if values.null_count:
        raise UsageError(
            f"data: {location}: {values.null_count:,} of {len(values):,} images have no {column}: filter them out, "
            "or use --data.labels=false"
        )
    dtype = str(values.type)
    class_names = tuple(names or ())
    if class_names or dtype.lstrip("u").startswith("int"):
        labels = values.to_numpy().astype(np.int64)
    elif dtype == "bool":
        labels = values.to_numpy().astype(np.int64)
        class_names = ("false", "true")
    else:
        parsed = [label_of_value(value) for value in values.to_pylist()]
        if None in parsed:
            value = printable(str(values[parsed.index(None)].as_py())[:40])
            raise UsageError(
                f"data: {location}: column {column} holds {value!r}, which is no class. Use numbers from 0 on, names "
                "or one-hot lists, or --data.labels=false"
            )
        rows = [f"{column} of row {row}" for row in range(len(parsed))]
        numbers, class_names = number_labels(parsed, rows, -1)
        labels = np.array(numbers, np.int64)
    check_labels(labels, location, len(class_names) or None)
    return labels, tuple(printable(str(name)) for name in class_names or default_class_names(labels))


def column_notes(kinds: Mapping[str, str], image_column: str, label_column: str | None) -> tuple[str, ...]:
    """Return the lines for `describe` about the columns that are read and those that are not."""
    others = [name for name in kinds if name not in (image_column, label_column)]
    notes = (f"ignored columns: {abbreviate(others, 10)}",) if others else ()
    return (f"labels of column {printable(label_column)}", *notes) if label_column else notes


def _format_columns(kinds: Mapping[str, str]) -> str:
    return printable(", ".join(f"{name}: {kind}" for name, kind in list(kinds.items())[:20]))
