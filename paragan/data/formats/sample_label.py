"""The label of one sample, in the forms that people write it: a number, a name, a one-hot list, or JSON.

A sample is an image with the members of a WebDataset shard, or the files beside it, of the same name.
"""

from __future__ import annotations

import json
import re
import unicodedata
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
MIN_IMAGES_PER_TEXT = 4  # on average: texts in .txt that occur more rarely are captions
_MAX_TEXTS = 100_000  # distinct ones that are remembered
_NUMBER = re.compile(r"\s*[+-]?[0-9]{1,20}(\.[0-9]{0,20})?(e[+-]?[0-9]{1,2})?\s*", re.IGNORECASE)
_SEPARATOR = re.compile(r"[\s,;]+")  # of several numbers


def parse_sample_label(members: Mapping[str, bytes], image_suffix: str) -> Label | None:
    """Return the label of a sample; None if its members hold none.

    Args:
        members: contents by suffix (all after the first dot of the name).
        image_suffix: that of the image. Its label has the same name up to the last dot.

    Raises:
        ValueError: a member that only labels have, or a key of JSON, cannot be read. The message shows it.
    """
    for suffix in LABEL_SUFFIXES:
        data = _find_member(members, suffix, image_suffix)
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


def parse_sample_text(members: Mapping[str, bytes], image_suffix: str, known: dict[str, str]) -> str | None:
    """Return the text in the .txt of a sample if it could be the name of a class, "" for other texts; None without.

    Args:
        members: as for `parse_sample_label`.
        image_suffix: the same.
        known: gets the texts, so that equal ones are one object.
    """
    data = _find_member(members, "txt", image_suffix)
    if data is None:
        return None
    text = _parse_text(data)
    if not isinstance(text, str) or (text not in known and len(known) == _MAX_TEXTS):
        return ""
    if all(map(_NUMBER.fullmatch, _SEPARATOR.split(text))):
        return ""  # several numbers, such as a box of YOLO
    return known.setdefault(text, text)


def names_of_texts(texts: Sequence[str | None]) -> list[str] | None:
    """Return the texts of all samples if they are names of classes; None if no sample has one.

    Raises:
        ValueError: they are captions, or some samples have none. The message says so.
    """
    names = {text for text in texts if text}
    if "" not in texts and None not in texts and len(names) * MIN_IMAGES_PER_TEXT <= len(texts):
        return [str(text) for text in texts]
    num_texts = sum(text is not None for text in texts)
    if not num_texts:
        return None
    example = f", such as {printable(min(names))[:40]!r}" if names else ""
    raise ValueError(
        f"the .txt beside {num_texts:,} of {len(texts):,} images hold {len(names):,} names{example}: captions are no "
        f"classes, whose names stand beside {MIN_IMAGES_PER_TEXT} images or more. Write the class into .cls, or use "
        "--data.labels=false"
    )


def missing_labels_error(num_missing: int, num_images: int, example: str) -> UsageError:
    """Return the error for images of which some have no label beside them. example: what messages call one of them."""
    return UsageError(
        f"data: {num_missing:,} of {num_images:,} images have no class ({example}), and the others have one beside "
        "them. Add a .cls with one to each, remove those of the others, or use --data.labels=false"
    )


def unreadable_label_message(place: str, error: ValueError) -> str:
    """Return the message for what `parse_sample_label` raises. place: the path of the sample without suffix."""
    return f"data: {place}.{error}. Write a number from 0 on or a name into a .cls, or use --data.labels=false"


def orphan_labels_message(names: Sequence[str], location: str) -> str:
    """Return the message for labels without image, where no image has a label. names: of these labels."""
    return (
        f"data: {location}: {len(names):,} labels belong to no image ({printable(names[0])}). Give both the same "
        "name, or use --data.labels=false"
    )


def _find_member(members: Mapping[str, bytes], suffix: str, image_suffix: str) -> bytes | None:
    """Return the member with a suffix that belongs to the image: of its name up to the last dot, or to the first."""
    prefix = image_suffix[: image_suffix.rfind(".") + 1]
    return members.get(prefix + suffix, members.get(suffix))


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
            return unicodedata.normalize("NFC", value) if _is_name(value) else None
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value == value // 1 and abs(value) < 2**53 else None


def _is_name(text: str) -> bool:
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


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
