"""A data set on disk as Hugging Face's `datasets` saves it (`save_to_disk`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.read_span import max_record_bytes, too_long_message
from paragan.data.formats.table_columns import (
    choose_image_column,
    choose_label_column,
    column_notes,
    number_label_column,
)
from paragan.data.source import DecodeError, LabelChoice
from paragan.data.storage.filesystem import DirListing, FileSystem, format_error, printable
from paragan.data.storage.local import LocalFileSystem

_STATE_FILE = "state.json"
_INFO_FILE = "dataset_info.json"
_SPLITS_FILE = "dataset_dict.json"


class ArrowSource:
    """The images of Arrow files, as encoded bytes. `datasets` maps the files into memory; it decodes and runs nothing.

    Args:
        location: what messages call it.
        images: the Arrow column of images.
        labels: [N] int64, or None.
        classes: [K] names.
        fingerprint: identifies the data.
        notes: lines for `describe`.
    """

    is_local = True
    array = None

    def __init__(
        self,
        location: str,
        images: Any,
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        fingerprint: bytes,
        notes: tuple[str, ...] = (),
    ):
        self.location = location
        self.images = images
        self.labels = labels
        self.classes = classes
        self.fingerprint = fingerprint
        self.notes = notes

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> bytes:
        """Return the encoded image `index`."""
        try:
            data = self.images[index].as_py()["bytes"]
        except Exception as error:  # Arrow may raise anything on damaged files
            raise DecodeError(format_error(error)) from None
        if not isinstance(data, bytes):
            raise DecodeError("its bytes are not in the data set, only its path: save it again with the images in it")
        if len(data) > max_record_bytes():
            raise DecodeError(too_long_message(len(data)))
        return data

    def sample_name(self, index: int) -> str:
        """Return what messages call image `index`."""
        return f"{self.location}, row {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names and sizes of the files, and state.json, which has a fingerprint of `datasets`."""
        yield self.fingerprint


def is_hf_dataset(listing: DirListing) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return _SPLITS_FILE in listing.files or {_STATE_FILE, _INFO_FILE} <= listing.files.keys()


def open_hf_dataset(fs: FileSystem, listing: DirListing, *, labels: LabelChoice = True) -> ArrowSource:
    """Open the data set in a folder of `save_to_disk`; of several splits the one called train.

    Raises:
        UsageError: it is remote, damaged, has no column of images, or `datasets` is not installed.
    """
    if fs.local_root is None:
        raise UsageError(
            f"data: {fs.location} was saved by `datasets` and can only be read locally: copy it to this machine first"
        )
    root = fs.local_root
    if _SPLITS_FILE in listing.files:
        if "train" in listing.folders:
            split = "train"
        elif len(listing.folders) == 1:
            split = listing.folders[0]
        elif not listing.folders:
            raise UsageError(f"data: {fs.location} holds no split: save the data set again with save_to_disk")
        else:
            splits = ", ".join(map(printable, listing.folders))
            raise UsageError(f"data: {fs.location} has no split called train, but {splits}. Give the folder of one")
        root /= split
        fs = LocalFileSystem(root)
        listing = fs.list_dir()
    files = _data_files(fs, listing)
    if not files:  # as `datasets` saves an empty set
        raise _no_image_error(fs.location)
    table, features = _load_table(root, fs.location)
    if not len(table):
        raise _no_image_error(fs.location)
    kinds = {name: type(feature).__name__ for name, feature in features.items()}
    column = choose_image_column(kinds, fs.location)
    fingerprint = repr([(name, fs.size(name)) for name in files]).encode() + fs.read(_STATE_FILE)
    label_column = choose_label_column(kinds, labels, fs.location)
    numbers: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    if label_column:
        names = getattr(features[label_column], "names", None)
        numbers, classes = number_label_column(table.column(label_column), names, label_column, fs.location)
    notes = column_notes(kinds, column, label_column)
    return ArrowSource(fs.location, table.column(column), numbers, classes, fingerprint, notes)


def _data_files(fs: FileSystem, listing: DirListing) -> list[str]:
    """Return the Arrow files that state.json names, all of which must lie in the folder."""
    path = fs.display_path(_STATE_FILE)
    try:
        names = [file["filename"] for file in json.loads(fs.read(_STATE_FILE))["_data_files"]]
        missing = [name for name in names if not isinstance(name, str) or name not in listing.files]
    except (ValueError, LookupError, TypeError, RecursionError, DecodeError, FileNotFoundError):
        raise UsageError(f"data: {path} is damaged: save the data set again with save_to_disk") from None
    if missing:
        name = printable(str(missing[0]))[:80]
        raise UsageError(
            f"data: {path} names {name}, which is not in its folder: save the data set again with save_to_disk"
        )
    return names


def _no_image_error(location: str) -> UsageError:
    return UsageError(f"data: {location} has no image. Give at least one")


def _load_table(root: Path, location: str) -> tuple[Any, Any]:
    """Return the validated Arrow table and the features (types of its columns)."""
    try:
        import datasets  # slow to import, and optional
    except ImportError:
        raise UsageError(
            f"data: {location} was saved by Hugging Face `datasets`: pip install datasets to read it"
        ) from None
    with _reraise_as_usage_error(location), _without_progress_bars(datasets):
        dataset = datasets.Dataset.load_from_disk(str(root.absolute()), keep_in_memory=False)
        for name, feature in dataset.features.items():
            if isinstance(feature, datasets.Image):
                dataset = dataset.cast_column(name, datasets.Image(decode=False))
        table = dataset.data.table
        table.validate(full=True)  # or a damaged file would be read beyond its end
        return table, dataset.features


@contextmanager
def _without_progress_bars(datasets: Any) -> Iterator[None]:
    was_enabled = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if was_enabled:
            datasets.enable_progress_bars()


@contextmanager
def _reraise_as_usage_error(location: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # `datasets` and Arrow raise anything on damaged files
        raise UsageError(
            f"data: {location} cannot be read by `datasets` ({format_error(error)}): save it again with save_to_disk"
        ) from None
