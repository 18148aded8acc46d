"""Labels in an array of one file: integers, whole floats, names of classes, or one-hot rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import check_labels, resolve_class_names, unknown_class_error
from paragan.data.formats.sample_label import label_of_value, number_labels
from paragan.data.storage.filesystem import printable

_REMEDY = "or use --data.labels=false"
_MAX_INTEGER = 2**53  # floats above this skip integers


def check_label_shape(shape: Sequence[int], key: str, location: str, count: int) -> None:
    """Check that an array can hold a label for each of `count` images: it is [count], or one-hot [count, K].

    Args:
        shape: of the array.
        key: its name.
        location: of its file, for messages.
        count: the number of images.

    Raises:
        UsageError: it cannot.
    """
    name = printable(key)
    if not shape:
        raise UsageError(
            f"data: {location}: {name} is a single value, expected [{count}], one an image. Write "
            f"np.full({count}, {name}), {_REMEDY}"
        )
    if shape[0] != count:
        raise UsageError(
            f"data: {location}: {name} are {list(shape)}, expected [{count}]: {shape[0]:,} {name} for {count:,} "
            f"images. Give one label an image, {_REMEDY}"
        )
    if len(shape) > 2 or (len(shape) == 2 and shape[1] < 2):
        flat = f"Write {name}.reshape(-1), {_REMEDY}" if set(shape[1:]) == {1} else f"Write them so, {_REMEDY}"
        raise UsageError(f"data: {location}: {name} are {list(shape)}, expected [{count}], one an image. {flat}")


def parse_label_array(
    values: np.ndarray, key: str, location: str, classes: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels [N] int64 and the names of the classes [K].

    Args:
        values: [N] numbers, str or bytes; or [N, K] one-hot.
        key: the name of the array.
        location: of its file, for messages.
        classes: [K] names if the file has them: names in `values` are among them, numbers count them.

    Raises:
        UsageError: the values are of another kind, or do not fit.
    """
    names: tuple[str, ...] = ()
    if values.ndim == 2:
        labels = _parse_one_hot(values, key, location, has_classes=bool(classes))
    elif values.dtype.kind in "US":
        labels, names = _parse_names(values, key, location, classes)
    else:
        labels = _parse_numbers(values, key, location)
    names = classes or names
    check_labels(labels, location, len(names) or None)
    labels = labels.astype(np.int64)
    return labels, resolve_class_names(labels, names)


def _parse_numbers(values: np.ndarray, key: str, location: str) -> np.ndarray:
    """Return numbers [N] as integers, of their own type if they have one."""
    name = printable(key)
    if values.dtype.kind in "iub":
        return values
    if values.dtype.kind != "f":
        raise UsageError(
            f"data: {location}: {name} are {values.dtype}, expected integers or names. Write whole numbers from 0 on, "
            f"{_REMEDY}"
        )
    numbers = values.astype(np.float64)
    is_whole = (np.abs(numbers) < _MAX_INTEGER) & (numbers == np.floor(numbers))  # False for NaN
    if not is_whole.all():
        value = values[int(np.argmin(is_whole))]
        raise UsageError(
            f"data: {location}: {name} are {values.dtype} and hold {value}, which is no class. Write whole numbers "
            f"from 0 on, {_REMEDY}"
        )
    return numbers.astype(np.int64)


def _parse_one_hot(values: np.ndarray, key: str, location: str, has_classes: bool) -> np.ndarray:
    name = printable(key)
    if values.dtype.kind not in "iubf":
        raise UsageError(
            f"data: {location}: {name} are {values.dtype} {list(values.shape)}. Write one class an image, "
            f"[{len(values)}], {_REMEDY}"
        )
    is_one = values == 1
    if not ((is_one.sum(1) == 1) & (np.count_nonzero(values, 1) == 1)).all():
        raise UsageError(
            f"data: {location}: {name} are {list(values.shape)} and not one-hot: rows hold other numbers than 0 and "
            f"a single 1. Write one class an image, [{len(values)}], {_REMEDY}"
        )
    unused = np.flatnonzero(~is_one.any(0))
    if len(unused) and not has_classes:
        raise UsageError(
            f"data: {location}: {name} are one-hot, but {len(unused):,} of {values.shape[1]:,} columns hold no 1 "
            f"(column {unused[0]}). Write {name}[:, {name}.any(0)], {_REMEDY}"
        )
    return is_one.argmax(1)


def _parse_names(
    values: np.ndarray, key: str, location: str, classes: tuple[str, ...]
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels and the names of the classes; () if the text of each is a number."""
    texts, index = np.unique(values, return_inverse=True)  # few: the names of the classes
    parsed = [label_of_value(_decode(text).strip()) for text in texts.tolist()]
    if None in parsed:
        value = texts.tolist()[parsed.index(None)]
        text = printable(value.decode(errors="replace") if isinstance(value, bytes) else value)[:40]
        raise UsageError(
            f"data: {location}: {printable(key)} hold {text!r}, which is no class. Write numbers from 0 on or names, "
            f"{_REMEDY}"
        )
    numbers, names = number_labels(parsed, [f"{location}, {printable(key)}"] * len(parsed), -1)
    if unknown := [name for name in names if classes and name not in classes]:
        raise unknown_class_error(unknown[0], location, "classes")
    if names and classes:
        numbers = [classes.index(names[number]) for number in numbers]
    return np.array(numbers, np.int64)[index], tuple(map(printable, names))


def _decode(text: str | bytes) -> str:
    """Return a text; "", which is no name, for bytes that are not UTF-8."""
    if isinstance(text, str):
        return text
    try:
        return text.decode()
    except UnicodeDecodeError:
        return ""
