"""Labels in files beside images: one file an image (0001.cls, .txt, .json), or a table (labels.csv, metadata.jsonl)."""

from __future__ import annotations

import csv
import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import check_labels, require_label_key, resolve_class_names, to_nfc
from paragan.data.formats.sample_label import (
    JSON_KEYS,
    Label,
    is_certain_label,
    is_label_suffix,
    label_of_value,
    missing_labels_error,
    names_of_texts,
    number_labels,
    orphan_labels_message,
    parse_sample_label,
    parse_sample_text,
    unreadable_label_message,
)
from paragan.data.source import LabelChoice
from paragan.data.storage.filesystem import abbreviate, format_error, printable

DATASET_JSON = "dataset.json"  # of all images of a folder (dataset_json.py)
TABLE_FILES = ("labels.csv", "labels.jsonl", "metadata.csv", "metadata.jsonl")  # the latter as Hugging Face has them

_UNREAD_STEMS = ("labels", "label", "targets", "annotations", "metadata")  # of files that look like labels
_FILE_COLUMNS = ("file_name", "filename", "file", "path", "image", "image_path", "image_name", "name", "image_id", "id")
_LABEL_COLUMNS = (*JSON_KEYS, "labels", "y", "targets")
_NO_LABEL = -1
_MAX_SAMPLED = 256  # files beside the images of class folders that are read first: if none is a label, none are
_EXPECTED_TABLE = "file_name,label"
_REMEDY = "or use --data.labels=false"

ReadFiles = Callable[[Sequence[str]], Iterable[bytes]]


@dataclass(frozen=True)
class ImageFiles:
    """The images of a folder or an archive, and the other files.

    location    : what messages call it
    images      : [N] paths of the images, in their order
    others      : paths of other files, in the folders of the images and around them
    read        : returns the contents of some of the others
    has_folders : whether the folders of the images are classes
    outer       : the folder around all images, with a slash; "" without
    is_archive  : whether they lie in one file
    """

    location: str
    images: Sequence[str]
    others: Sequence[str]
    read: ReadFiles
    has_folders: bool
    outer: str = ""
    is_archive: bool = False

    def display_path(self, name: str) -> str:
        """Return the path of a file for messages."""
        return f"{self.location}/{printable(name)}"


@dataclass(frozen=True)
class FileLabels:
    """Labels of images.

    labels  : [N] int64
    classes : [K] names
    files   : those that hold them
    note    : a line for `describe`
    """

    labels: np.ndarray
    classes: tuple[str, ...]
    files: frozenset[str]
    note: str


@dataclass
class _Table:
    """A parsed table: the label of each file that it names, or the reason why it has none."""

    name: str
    column: str = ""
    label_by_name: dict[str, Label] = field(default_factory=dict)
    problem: str = ""


def read_label_files(files: ImageFiles, labels: LabelChoice) -> FileLabels | None:
    """Return the labels that files beside the images hold; None if there are none.

    Labels of single images come before class folders, as in WebDataset; tables and names in .txt after them.

    Args:
        files: the images, and the other files.
        labels: whether to read labels, or the column of tables that holds them.

    Raises:
        UsageError: files that look like labels cannot be read, or do not fit the images.
    """
    if not labels:
        return None
    for name in files.others:
        if _base_of(name) == DATASET_JSON:
            raise UsageError(
                f"data: {files.display_path(name)} is not beside all images or above them, and is not read. Move it "
                f"there, with paths from there in it, or away"
            )
    names = [name for name in files.others if is_label_table(name)]
    if isinstance(labels, str):
        if not names:
            raise UsageError(
                f"data.label_key={printable(labels)}: {files.location} has no {', '.join(TABLE_FILES)}, whose columns "
                "could be chosen. Leave it out"
            )
        return _join_tables(files, [_read_table(files, name, labels) for name in names])
    members = _read_sidecars(files)
    result = _labels_of_samples(files, members)
    if files.has_folders and not result:
        _require_no_splits(files, names)
    if result or files.has_folders:
        return result
    tables = [_read_table(files, name, "") for name in names]
    if any(table.label_by_name for table in tables):
        return _join_tables(files, [table for table in tables if table.label_by_name])
    return _labels_of_texts(files, members) or _require_no_labels(files, tables)


def _require_no_splits(files: ImageFiles, tables: Sequence[str]) -> None:
    """Raise UsageError if each folder of images has its own table."""
    folders = sorted({_folder_of(name) for name in files.images})
    if not {_folder_of(name) for name in tables}.issuperset(folders):
        return
    remedy = f"Use --data={files.display_path(folders[0])}"
    if files.is_archive:
        remedy = f"Write {printable(folders[0])} into an archive of its own"
    raise UsageError(splits_message(files.location, folders, remedy))


def splits_message(location: str, folders: Sequence[str], remedy: str) -> str:
    """Return the message for folders that each have a table: parts of a data set, such as train and test."""
    return (
        f"data: {location}: each of its folders ({abbreviate(folders)}) has a table ({', '.join(TABLE_FILES)}): they "
        f"are parts of a data set, and no classes. {remedy}, move the tables away, {_REMEDY}"
    )


def is_label_table(name: str) -> bool:
    """Return whether a file is a table of labels by its name."""
    return _base_of(name).lower() in TABLE_FILES


def resembles_labels(name: str) -> bool:
    """Return whether a file looks like labels of many images by its name."""
    return _base_of(name).partition(".")[0].lower() in _UNREAD_STEMS


def _base_of(name: str) -> str:
    return name.rpartition("/")[2]


def _folder_of(name: str) -> str:
    return to_nfc(name).rpartition("/")[0]


def _split_name(name: str) -> tuple[str, str]:
    """Return the key of the sample to which a file belongs, up to the first dot, and its suffix, as WebDataset does."""
    folder, slash, base = to_nfc(name).rpartition("/")
    stem, _, suffix = base.partition(".")
    return folder + slash + stem, suffix.lower()


# Files of single images ---------------------------------------------------------------------------------------


def _read_sidecars(files: ImageFiles) -> dict[str, dict[str, tuple[str, bytes]]]:
    """Return the files that may be labels by key and suffix: name and contents."""
    keys = {_split_name(name)[0] for name in files.images}
    names: list[str] = []
    uncertain: list[str] = []
    for name in files.others:
        key, suffix = _split_name(name)
        if is_certain_label(suffix):
            names.append(name)
        elif key in keys and is_label_suffix(suffix):
            uncertain.append(name)
    if not files.has_folders or len(uncertain) <= _MAX_SAMPLED or _sample_has_label(files, uncertain):
        names += uncertain
    members: dict[str, dict[str, tuple[str, bytes]]] = defaultdict(dict)
    for name, data in zip(names, files.read(names)):
        key, suffix = _split_name(name)
        members[key][suffix] = name, data
    return members


def _sample_has_label(files: ImageFiles, names: Sequence[str]) -> bool:
    """Return whether one of at most _MAX_SAMPLED files, evenly spaced, is a label."""
    sample = names[:: -(-len(names) // _MAX_SAMPLED)]
    for name, data in zip(sample, files.read(sample)):
        suffix = _split_name(name)[1]
        try:
            if parse_sample_label({suffix.rpartition(".")[2]: data}, "") is not None:
                return True
        except ValueError:
            return True
    return False


def _members_of(members: Mapping[str, Mapping[str, tuple[str, bytes]]], image: str) -> tuple[dict[str, bytes], str]:
    """Return the contents by suffix of the files that belong to an image, and its suffix."""
    key, suffix = _split_name(image)
    return {member: data for member, (_, data) in members.get(key, {}).items()}, suffix


def _labels_of_samples(files: ImageFiles, members: dict[str, dict[str, tuple[str, bytes]]]) -> FileLabels | None:
    certain = [name for group in members.values() for suffix, (name, _) in group.items() if is_certain_label(suffix)]
    labels: list[Label | None] = []
    for image in files.images:
        try:
            labels.append(parse_sample_label(*_members_of(members, image)))
        except ValueError as error:
            stem = files.display_path(_split_name(image)[0])
            raise UsageError(unreadable_label_message(stem, error)) from None
    num_missing = labels.count(None)
    if num_missing == len(labels) and certain:
        raise UsageError(orphan_labels_message(certain, files.location))
    if num_missing == len(labels):
        return None
    if num_missing:
        raise missing_labels_error(num_missing, len(labels), files.display_path(files.images[labels.index(None)]))
    used = {_split_name(name)[0] for name in files.images}
    sidecars = {name: suffix for key in used for suffix, (name, _) in members.get(key, {}).items()}
    return _number(files, [label for label in labels if label is not None], sidecars)


def _labels_of_texts(files: ImageFiles, members: dict[str, dict[str, tuple[str, bytes]]]) -> FileLabels | None:
    known: dict[str, str] = {}
    try:
        names = names_of_texts([parse_sample_text(*_members_of(members, image), known) for image in files.images])
    except ValueError as error:
        raise UsageError(f"data: {files.location}: {error}") from None
    if names is None:
        return None
    sidecars = {name: suffix for group in members.values() for suffix, (name, _) in group.items() if suffix == "txt"}
    return _number(files, names, sidecars)


def _number(files: ImageFiles, labels: Sequence[Label], sidecars: Mapping[str, str]) -> FileLabels:
    """Return labels of single images as numbers. sidecars: the files that hold them, with their suffixes."""
    numbers, names = number_labels(labels, [files.display_path(image) for image in files.images], _NO_LABEL)
    array = np.array(numbers, np.int64)
    check_labels(array, files.location, len(names) or None)
    suffixes = sorted({f".{suffix.rpartition('.')[2]}" for suffix in sidecars.values()})
    note = f"labels of {len(sidecars):,} files beside the images ({', '.join(suffixes)})"
    return FileLabels(array, resolve_class_names(array, names), frozenset(sidecars), note)


# Tables -------------------------------------------------------------------------------------------------------


def _read_table(files: ImageFiles, name: str, column: str) -> _Table:
    """Read the table `name`. column: of the labels; "" for the usual one."""
    path = files.display_path(name)
    (data,) = files.read([name])
    try:
        columns, rows = _parse_csv(data, column) if name.lower().endswith(".csv") else _parse_jsonl(data)
    except (ValueError, RecursionError, csv.Error) as error:
        raise UsageError(
            f"data: {path} cannot be read ({format_error(error)}). Write it with columns {_EXPECTED_TABLE}, {_REMEDY}"
        ) from None
    if not columns:
        return _Table(name, problem=_no_rows_message(path))
    by_lower = {key.lower(): key for key in reversed(columns)}
    file_column = next((by_lower[key] for key in _FILE_COLUMNS if key in by_lower), None)
    if column:
        require_label_key(columns, column, path)
    else:
        column = next((by_lower[key] for key in _LABEL_COLUMNS if key in by_lower), "")
    if not column or file_column is None:
        return _Table(name, problem=_unusable_table_message(path, columns, column))
    for key in (file_column, column):
        if columns.count(key) > 1:
            raise UsageError(
                f"data: {path} has the column {printable(key)} twice. Give each a name of its own, {_REMEDY}"
            )
    table = _Table(name, column)
    folder = name[: len(name) - len(_base_of(name))]
    for row in rows:
        value = row.get(column)
        label = label_of_value(value.strip() if isinstance(value, str) else value)
        if label is None:
            raise UsageError(
                f"data: {path}: column {printable(column)} holds {printable(str(value))[:40]!r}, which is no class. "
                f"Write a number from 0 on or a name, {_REMEDY}"
            )
        file_name = folder + str(row.get(file_column)).strip().replace("\\", "/").removeprefix("./")
        first = table.label_by_name.setdefault(to_nfc(file_name), label)
        if first != label:
            raise UsageError(
                f"data: {path} names {printable(file_name)} twice, as {printable(str(first))} and "
                f"{printable(str(label))}. Leave one out, {_REMEDY}"
            )
    if not rows:
        table.problem = _no_rows_message(path)
    return table


def _parse_csv(data: bytes, column: str) -> tuple[list[str], list[dict]]:
    """Return the columns of a table and its rows. Its delimiter is the one that separates the usual columns.

    column: of the labels, if it is known. Raises ValueError or csv.Error.
    """
    text = data.decode("utf-8-sig")
    header = text.lstrip("\r\n").partition("\n")[0]
    known = [{name.lower() for name in names} for names in (_FILE_COLUMNS, [column] if column else _LABEL_COLUMNS)]

    def count_known(delimiter: str) -> tuple[int, int]:
        names = {name.strip().strip('"').lower() for name in header.split(delimiter)}
        return sum(not names.isdisjoint(usual) for usual in known), header.count(delimiter)

    delimiter = max(",;\t", key=count_known)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, skipinitialspace=True)
    lines = [line for line in reader if line]
    columns = [name.strip() for name in lines[0]] if lines else []
    return columns, [dict(zip(columns, line)) for line in lines[1:]]


def _parse_jsonl(data: bytes) -> tuple[list[str], list[dict]]:
    """Return the keys of the objects in lines of JSON, and the objects. Raises ValueError or RecursionError."""
    rows = [json.loads(line) for line in data.decode("utf-8-sig").split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("a line is no object")
    return list(dict.fromkeys(key for row in rows for key in row)), rows


def _no_rows_message(path: str) -> str:
    return f"data: {path} has no rows. Write one for each image, with columns {_EXPECTED_TABLE}, {_REMEDY}"


def _unusable_table_message(path: str, columns: Sequence[str], column: str) -> str:
    shown = abbreviate(columns, 10) or "nothing"
    if column:
        return f"data: {path} has no column of file names, only {shown}. Write columns {_EXPECTED_TABLE}, {_REMEDY}"
    return (
        f"data: {path} has no column of labels, only {shown}. Choose one with --data.label_key=COLUMN, call it label, "
        f"{_REMEDY}"
    )


def _join_tables(files: ImageFiles, tables: Sequence[_Table]) -> FileLabels:
    """Return the labels of all images, each from one of the tables.

    Raises:
        UsageError: a table cannot be used, tables contradict each other, or an image is in none.
    """
    label_by_name = _merge_tables(files, tables)
    path = files.display_path(abbreviate([table.name for table in tables]))
    labels: list[Label] = []
    missing: list[str] = []
    row_names: set[str] = set()  # that rows of these images may have
    for image in map(to_nfc, files.images):
        stem = image.rpartition(".")[0]
        row_names |= {image, stem}
        label = label_by_name.get(image, label_by_name.get(stem))
        if label is None:
            missing.append(image)
            continue
        if label != label_by_name.get(stem, label):
            raise UsageError(
                f"data: {path} names {printable(image)} as {printable(str(label))}, and {printable(stem)} as "
                f"{printable(str(label_by_name[stem]))}. Leave one out, {_REMEDY}"
            )
        labels.append(label)
    if missing:
        raise UsageError(
            f"data: {path} has no label of {len(missing):,} of {len(files.images):,} images ({abbreviate(missing)}). "
            f"Add them, {_REMEDY}"
        )
    numbers, names = number_labels(labels, [files.display_path(image) for image in files.images], _NO_LABEL)
    array = np.array(numbers, np.int64)
    check_labels(array, path, len(names) or None)
    num_others = sum(
        row_names.isdisjoint(_possible_names(files, table, name)) for table in tables for name in table.label_by_name
    )
    note = f"labels of {abbreviate([table.name for table in tables])}, column {printable(tables[0].column)}"
    if num_others:
        note += f"; {num_others:,} of the rows name other files"
    return FileLabels(array, resolve_class_names(array, names), frozenset(table.name for table in tables), note)


def _merge_tables(files: ImageFiles, tables: Sequence[_Table]) -> dict[str, Label]:
    """Return the label of each name that the rows of the tables may mean."""
    label_by_name: dict[str, Label] = {}
    table_by_name: dict[str, _Table] = {}
    for table in tables:
        if table.problem:
            raise UsageError(table.problem)
        for name, label in table.label_by_name.items():
            for possible in _possible_names(files, table, name):
                first = label_by_name.setdefault(possible, label)
                other = table_by_name.setdefault(possible, table)
                if first != label:
                    place = "" if other is table else f" in {printable(other.name)}"
                    raise UsageError(
                        f"data: {files.display_path(table.name)} names {printable(name)} as {printable(str(label))}, "
                        f"but it is {printable(str(first))}{place}. Leave one out, {_REMEDY}"
                    )
    return label_by_name


def _possible_names(files: ImageFiles, table: _Table, name: str) -> set[str]:
    """Return the paths that a row may mean: a table around the images may name them without their folder."""
    folder = table.name[: len(table.name) - len(_base_of(table.name))]
    if not files.outer.startswith(folder):
        return {name}
    return {name, files.outer + name.removeprefix(folder)}


def _require_no_labels(files: ImageFiles, tables: Sequence[_Table]) -> None:
    """Raise UsageError if a file that looks like labels was not read."""
    for table in tables:
        raise UsageError(table.problem)
    for name in files.others:
        if resembles_labels(name):
            raise UsageError(
                f"data: {files.display_path(name)} looks like labels, and is not read. Write labels.csv with columns "
                f"{_EXPECTED_TABLE}, {_REMEDY}"
            )
