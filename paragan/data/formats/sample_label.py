"""The label of one WebDataset sample, in the forms that people write it: a number, a name, a one-hot list, or JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import sort_class_names
from paragan.data.storage.filesystem import printable

Label = int | str  # the index of a class, or its name

CERTAIN_SUFFIXES = ("cls", "label", "class")  # of members that only labels have
LABEL_SUFFIXES = (*CERTAIN_SUFFIXES, "txt", "json")  # of members that may hold the label, in order of preference
JSON_KEYS = ("label", "class", "cls", "class_id", "label_id", "class_name", "category", "target")  # the same, in .json
MAX_NAME_CHARS = 200
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,20}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,2})?\s*", re.IGNORECASE)


def parse_sample_label(members: Mapping[str, bytes], image_suffix: str) -> Label | None:
    """Return the label of a sample; None if its members hold none.

    Args:
        members: contents by suffix (all after the first dot of the name).
        image_suffix: that of the image. Its label has the same name up to the last dot.

    Raises:
        ValueError: a member that only labels have, or a key of JSON, cannot be read. The message shows it.
    """
    prefix = image_suffix[: image_suffix.rfind(".") + 1]
    for suffix in LABEL_SUFFIXES:
        data = members.get(prefix + suffix, members.get(suffix))
        if data is None:
            continue
        label = _parse_json_label(data) if suffix == "json" else _parse_text(data)
        if suffix == "txt" and not isinstance(label, int):
            continue  # a caption
        if label is not None:
            return label
        if suffix != "json":
            raise ValueError(f"{suffix} holds {_excerpt(data)}, which is no class")
    for suffix in members:
        if is_certain_label(suffix):
            raise ValueError(f"{printable(suffix)}: looks like a label, and labels of this name are not read")
    return None


def is_certain_label(suffix: str) -> bool:
    """Return whether only labels have such a suffix: cls, label and class, and cls.txt or label.npy."""
    return not {*suffix.split(".")}.isdisjoint(CERTAIN_SUFFIXES)


def is_label_suffix(suffix: str) -> bool:
    """Return whether a member with this suffix may hold a label."""
    return suffix.rpartition(".")[2] in LABEL_SUFFIXES or is_certain_label(suffix)


def _parse_text(data: bytes) -> Label | None:
    try:
        text = data.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        return None
    if text.startswith("["):
        return label_of_value(_parse_json(data))
    return label_of_value(text)


def _parse_json_label(data: bytes) -> Label | None:
    """Return a label written as JSON: a value, a one-hot list, or an object that has it under one of `JSON_KEYS`.

    Raises:
        ValueError: such a key holds something else.
    """
    content = _parse_json(data)
    if not isinstance(content, dict):
        return label_of_value(content)
    value_by_key = {key.lower(): value for key, value in content.items() if value is not None}
    for key in JSON_KEYS:
        if key in value_by_key:
            label = label_of_value(value_by_key[key])
            if label is None:
                text = json.dumps({key: value_by_key[key]})
                raise ValueError(f"json holds {_excerpt(text.encode())}, which is no class")
            return label
    return None


def _parse_json(data: bytes) -> Any:
    """Return the content of JSON; None if it is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _excerpt(data: bytes) -> str:
    return repr(printable(data[:40].decode("utf8", "replace")))


def label_of_value(value: Any) -> Label | None:
    """Return the label that a number, a text or a one-hot list stands for; None if it is none of them.

    Text in digits is a number, other text is a name.
    """
    if isinstance(value, list):
        is_one_hot = len(value) > 1 and value.count(1) == 1 and value.count(0) == len(value) - 1
        return value.index(1) if is_one_hot else None
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value):
            return value if 0 < len(value) <= MAX_NAME_CHARS and value.isprintable() else None
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value == value // 1 and abs(value) < 2**53 else None


def number_labels(
    labels: Sequence[Label | None], keys: Sequence[str], missing: int
) -> tuple[list[int], tuple[str, ...]]:
    """Turn labels into indices of classes.

    Args:
        labels: [N].
        keys: [N] names of the samples, for messages.
        missing: the index of an image without label.

    Returns:
        [N] indices, and the names of the classes where labels are names, else ().

    Raises:
        UsageError: some labels are numbers and others names.
    """
    names = {label for label in labels if isinstance(label, str)}
    if not names:
        return [missing if label is None else int(label) for label in labels], ()
    for key, label in zip(keys, labels):
        if isinstance(label, int):
            raise UsageError(
                f"data: {printable(key)}: its label is the number {label}, and others are names such as "
                f"{printable(min(names))}. Use one kind, or --data.labels=false"
            )
    ordered = sort_class_names(names)
    index = {name: number for number, name in enumerate(ordered)}
    return [missing if label is None else index[str(label)] for label in labels], tuple(ordered)
