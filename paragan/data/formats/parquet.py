"""Data sets in Parquet files, as the Hugging Face hub stores most of them, read from wherever their files are.

    data/train-00000-of-00002.parquet       one file or several; of several splits the one called train
    data/train-00001-of-00002.parquet

A Parquet file can be read by row groups only (`datasets` writes 100 images in each). The encoded images of the groups
that were read last are kept in memory.
"""

from __future__ import annotations

import json
import posixpath
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from paragan.core.errors import RunError, UsageError
from paragan.data.formats.read_span import FileStamp, max_record_bytes, too_long_message
from paragan.data.formats.table_columns import (
    choose_image_column,
    choose_label_column,
    column_notes,
    number_label_column,
)
from paragan.data.source import DecodeError, LabelChoice
from paragan.data.storage.filesystem import DirListing, FileSystem, abbreviate, format_error
from paragan.data.storage.range_reader import RangeReader

SUFFIX = ".parquet"
TRAIN_SPLIT = "train"
CACHE_BYTES = 2**29  # of encoded images in memory
MAX_GROUP_BYTES = 2**32  # of a row group, which is read as a whole
NUM_THREADS = 16  # that read footers and labels
_SPLIT_PATTERN = re.compile(
    r"(.+)-(\d{5})-of-(\d{5})(?:-[0-9a-f]+)?\.parquet", re.IGNORECASE
)  # as `datasets` names files


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file.

    file   : name of the file
    number : of the group in its file
    start  : index of its first row in the data set
    rows   : how many there are
    """

    file: str
    number: int
    start: int
    rows: int


class ParquetSource:
    """The images of Parquet files, as encoded bytes.

    Args:
        fs: the folder of the files.
        footers: metadata of each file by its name, as pyarrow reads it.
        column: of images.
        labels: [N] int64, or None.
        classes: [K] names.
        notes: lines for `describe`.
    """

    array = None

    def __init__(
        self,
        fs: FileSystem,
        footers: Mapping[str, Any],
        column: str,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.fs = fs
        self.location = fs.location if len(footers) != 1 else fs.display_path(next(iter(footers)))
        self.is_local = not fs.is_remote
        self.labels = labels
        self.classes = classes
        self.notes = notes
        self.groups = list_row_groups(footers)
        self._footers = footers
        self._stamps = {name: FileStamp(fs, name) for name in footers}
        self._column = column
        self._starts = np.array([group.start for group in self.groups])
        self._cache: OrderedDict[int, Any] = OrderedDict()  # row group -> its images, an Arrow column
        self._lock = threading.Lock()
        self._group_locks = [threading.Lock() for _ in self.groups]

    def __len__(self) -> int:
        return sum(group.rows for group in self.groups)

    def read(self, index: int) -> bytes:
        """Return the encoded image `index`."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        images = self._read_group(number)
        data = images[index - self.groups[number].start].as_py()
        if isinstance(data, dict):
            data = data.get("bytes")
        if not isinstance(data, bytes):
            raise DecodeError("its bytes are not in the file, only its path: write the images into the file")
        if len(data) > max_record_bytes():
            raise DecodeError(too_long_message(len(data)))
        return data

    def sample_name(self, index: int) -> str:
        """Return what messages call image `index`."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        group = self.groups[number]
        first = next(one.start for one in self.groups if one.file == group.file)
        return f"{self.fs.display_path(group.file)}, row {index - first}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield name and size of every file, and sizes of its row groups: the format has no checksum of all."""
        for name, footer in self._footers.items():
            sizes = [footer.row_group(number).total_byte_size for number in range(footer.num_row_groups)]
            yield repr((name, self.fs.size(name), footer.num_rows, sizes)).encode()

    def _read_group(self, number: int) -> Any:
        with self._group_locks[number]:  # threads that need the same group read it once
            with self._lock:
                if number in self._cache:
                    self._cache.move_to_end(number)
                    return self._cache[number]
            group = self.groups[number]
            with self._stamps[group.file].checked_read():
                table = _read_columns(self.fs, group.file, self._footers[group.file], group.number, [self._column])
            images = table.column(self._column)
            if len(images) != group.rows:
                raise DecodeError(f"row group {number} has {len(images)} rows, and not {group.rows} as the file says")
            with self._lock:
                self._cache[number] = images
                while len(self._cache) > 1 and sum(one.nbytes for one in self._cache.values()) > CACHE_BYTES:
                    self._cache.popitem(last=False)
            return images


def find_parquet_files(listing: DirListing) -> list[str]:
    """Return the Parquet files of a folder."""
    return [name for name in listing.files if name.lower().endswith(SUFFIX)]


def open_parquet(fs: FileSystem, names: Sequence[str], *, labels: LabelChoice = True) -> ParquetSource:
    """Open the data set in Parquet files of one folder.

    Raises:
        UsageError: pyarrow is not installed, a file is damaged, there is no column of images, or no split called train.
    """
    location = fs.location if len(names) != 1 else fs.display_path(names[0])
    chosen, other_splits = _choose_split(names, location)
    _check_numbers(chosen, location)
    with ThreadPoolExecutor(NUM_THREADS, "parquet") as pool:
        footers = dict(zip(chosen, pool.map(lambda name: _read_footer(fs, name), chosen)))
        schemas = {name: footer.schema.to_arrow_schema() for name, footer in footers.items()}
        kinds, class_names = _describe_columns(schemas[chosen[0]])
        for name, schema in schemas.items():
            _check_columns(fs, name, schema, chosen[0], (kinds, class_names))
        column = choose_image_column(kinds, location)
        label_column = choose_label_column(kinds, labels, location)
        if not sum(footer.num_rows for footer in footers.values()):
            raise UsageError(f"data: {location} has no image. Give at least one")
        for name, footer in footers.items():
            _check_group_sizes(fs.display_path(name), footer)
        numbers: np.ndarray | None = None
        classes: tuple[str, ...] = ()
        if label_column:
            values = _read_label_values(fs, footers, label_column, pool)
            numbers, classes = number_label_column(values, class_names.get(label_column), label_column, location)
    notes = column_notes(kinds, column, label_column)
    if other_splits:
        notes = (*notes, f"ignored splits: {abbreviate(other_splits, 10)}")
    return ParquetSource(fs, footers, column, numbers, classes, notes)


def list_row_groups(footers: Mapping[str, Any]) -> list[RowGroup]:
    """Return the row groups of files that have rows, in order."""
    groups: list[RowGroup] = []
    start = 0
    for name, footer in footers.items():
        for number in range(footer.num_row_groups):
            rows = footer.row_group(number).num_rows
            if rows:
                groups.append(RowGroup(name, number, start, rows))
            start += rows
    return groups


def _choose_split(names: Sequence[str], location: str) -> tuple[list[str], list[str]]:
    """Return the files of the split to read, and the names of other splits. Files that name no split are one."""
    by_split: dict[str, list[str]] = {}
    for name in sorted(names):
        match = _SPLIT_PATTERN.fullmatch(posixpath.basename(name))
        split = match[1] if match else posixpath.splitext(posixpath.basename(name))[0]
        is_split = match or split.lower() in ("train", "test", "validation")
        by_split.setdefault(split.lower() if is_split else "files that name no split", []).append(name)
    if len(by_split) == 1:
        return next(iter(by_split.values())), []
    if TRAIN_SPLIT in by_split:
        return by_split[TRAIN_SPLIT], [split for split in by_split if split != TRAIN_SPLIT]
    splits = ", ".join(by_split)
    raise UsageError(f"data: {location} has no split called train, but {splits}. Give one of its files")


def _check_numbers(names: Sequence[str], location: str) -> None:
    """Raise UsageError if files of a split are missing, by their numbers."""
    numbers = [match for name in names if (match := _SPLIT_PATTERN.fullmatch(posixpath.basename(name)))]
    totals = {int(match[3]) for match in numbers}
    if totals and (len(totals) > 1 or {int(match[2]) for match in numbers} != set(range(*totals))):
        files = abbreviate([match[0] for match in numbers], 5)
        raise UsageError(f"data: {location}: these are not all files of one split: {files}. Copy it again, whole")


def _check_columns(
    fs: FileSystem, name: str, schema: Any, first_name: str, expected: tuple[dict[str, str], dict[str, list[str]]]
) -> None:
    """Raise UsageError unless a file has the columns and classes of the first one, each once."""
    path = fs.display_path(name)
    if len(set(schema.names)) != len(schema.names):
        raise UsageError(f"data: {path} has several columns of one name ({abbreviate(schema.names, 10)})")
    kinds, class_names = _describe_columns(schema)
    has_other_columns = kinds.keys() != expected[0].keys() or _image_columns(kinds) != _image_columns(expected[0])
    if has_other_columns or class_names != expected[1]:
        raise UsageError(
            f"data: {path} has other columns or classes ({abbreviate(schema.names, 10)}) than "
            f"{fs.display_path(first_name)}. Give a folder with one data set"
        )


def _image_columns(kinds: Mapping[str, str]) -> list[str]:
    return [name for name, kind in kinds.items() if kind == "Image"]


def _read_footer(fs: FileSystem, name: str) -> Any:
    parquet = _import_pyarrow(fs.display_path(name))
    try:
        return parquet.ParquetFile(_open(fs, name)).metadata
    except (UsageError, RunError):
        raise
    except Exception as error:  # Arrow raises anything on damaged files
        raise UsageError(
            f"data: {fs.display_path(name)} cannot be read as Parquet ({format_error(error)}). Write the file again"
        ) from None


def _open(fs: FileSystem, name: str) -> RangeReader:
    """Open a file of which every read is one request, cached on disk like any other range of a remote file."""
    return RangeReader(fs.size(name), lambda start, end: fs.read(name, start, end - start))


def _check_group_sizes(path: str, footer: Any) -> None:
    for number in range(footer.num_row_groups):
        size = footer.row_group(number).total_byte_size
        if size > MAX_GROUP_BYTES:
            raise UsageError(
                f"data: {path}: row group {number} takes {size:,} bytes, and has to be read as a whole. Write smaller "
                "ones: row_group_size=100 of pyarrow.parquet.write_table"
            )


def _read_columns(fs: FileSystem, name: str, footer: Any, number: int, columns: list[str]) -> Any:
    """Read columns of a row group. Every call opens the file: pyarrow's readers are not safe in several threads."""
    parquet = _import_pyarrow(fs.display_path(name))
    try:
        file = parquet.ParquetFile(_open(fs, name), metadata=footer, pre_buffer=False)
        return file.read_row_group(number, columns=columns, use_threads=False).combine_chunks()
    except (UsageError, RunError, DecodeError):
        raise
    except Exception as error:
        raise DecodeError(f"row group {number} cannot be read: {format_error(error)}") from None


def _read_label_values(fs: FileSystem, footers: Mapping[str, Any], column: str, pool: ThreadPoolExecutor) -> Any:
    """Return the whole column of labels, an Arrow array."""
    import pyarrow

    def read(group: RowGroup) -> Any:
        try:
            return _read_columns(fs, group.file, footers[group.file], group.number, [column]).column(column)
        except DecodeError as error:
            raise UsageError(
                f"data: {fs.display_path(group.file)}: column {column} of {error}. Leave it out with "
                "--data.labels=false"
            ) from None

    chunks = [chunk for one in pool.map(read, list_row_groups(footers)) for chunk in one.chunks]
    try:
        if all(pyarrow.types.is_integer(chunk.type) for chunk in chunks):
            chunks = [chunk.cast(pyarrow.int64()) for chunk in chunks]
        return pyarrow.chunked_array(chunks)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise UsageError(f"data: {fs.location}: column {column}: {format_error(error)}") from None


def _describe_columns(schema: Any) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the kind of every column (Image, ClassLabel or an Arrow type), and the class names of ClassLabels.

    `datasets` writes its features into the metadata of the schema. Without them, a column of images is one of
    structures with bytes, or one of bytes that is called image, img or like a format of images.
    """
    import pyarrow

    features = _read_features(schema)
    kinds: dict[str, str] = {}
    class_names: dict[str, list[str]] = {}
    for field in schema:
        feature = features.get(field.name)
        feature = feature if isinstance(feature, Mapping) else {}
        kind = str(feature.get("_type", ""))
        if kind == "ClassLabel" and not pyarrow.types.is_integer(field.type):
            kind = ""
        if kind == "ClassLabel" and isinstance(feature.get("names"), list):
            class_names[field.name] = [str(name) for name in feature["names"]]
        if kind not in ("Image", "ClassLabel"):
            kind = "Image" if _resembles_images(field) else str(field.type)
        kinds[field.name] = kind
    return kinds, class_names


def _read_features(schema: Any) -> Mapping[str, Any]:
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return {}
    return features if isinstance(features, Mapping) else {}


def _resembles_images(field: Any) -> bool:
    import pyarrow

    if pyarrow.types.is_struct(field.type):
        return any(part.name == "bytes" and _is_binary(part.type) for part in field.type)
    return _is_binary(field.type) and field.name.lower() in ("image", "img", "jpg", "jpeg", "png", "webp")


def _is_binary(arrow_type: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_binary(arrow_type) or pyarrow.types.is_large_binary(arrow_type)


def _import_pyarrow(location: str) -> Any:
    try:
        from pyarrow import parquet  # slow to import, and optional
    except ImportError:
        raise UsageError(f"data: {location} is Parquet: pip install pyarrow to read it") from None
    return parquet
