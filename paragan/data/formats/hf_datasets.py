"""A set as Hugging Face's `datasets` leaves it on disk (`save_to_disk`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import MAX_RECORD_BYTES
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import DirListing, FileSystem, format_error, printable
from paragan.data.storage.local import LocalFileSystem

_STATE_FILE, _INFO_FILE, _SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"
_IMAGE_COLUMNS, _LABEL_COLUMNS = (
    ("image", "img"),
    ("label", "labels", "fine_label"),
)  # names that decide where several columns could


class ArrowSource:
    """Images in Arrow files, as the bytes that were saved. `datasets` maps them; nothing is decoded or run by it."""

    is_local, array = True, None

    def __init__(
        self, location: str, images: Any, labels: np.ndarray | None, classes: tuple[str, ...], fingerprint: bytes
    ):
        self.location, self.images, self.fingerprint = location, images, fingerprint
        self.labels, self.classes, self.notes = labels, classes, ()

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> bytes:
        try:
            data = self.images[index].as_py()["bytes"]
        except Exception as error:  # whatever Arrow minds
            raise DecodeError(format_error(error)) from None
        if not isinstance(data, bytes):
            raise DecodeError("its bytes are not in the set, only its path: save it again with the images in it")
        if len(data) > MAX_RECORD_BYTES:
            raise DecodeError(f"takes {len(data):,} bytes, more than any image ({MAX_RECORD_BYTES:,})")
        return data

    def sample_name(self, index: int) -> str:
        return f"{self.location}, row {index}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        yield self.fingerprint


def is_hf_dataset(listing: DirListing) -> bool:
    """Whether a folder is one that `save_to_disk` left."""
    return _SPLITS_FILE in listing.files or {_STATE_FILE, _INFO_FILE} <= listing.files.keys()


def open_hf_dataset(fs: FileSystem, listing: DirListing, *, labels: bool = True) -> ArrowSource:
    """The set in a folder of `save_to_disk`; of several splits the one called train."""
    if fs.is_remote or not isinstance(fs, LocalFileSystem):
        raise UsageError(f"data: {fs.location} is a set of `datasets`, read from this machine only: copy it here first")
    if _SPLITS_FILE in listing.files:
        split = "train" if "train" in listing.folders else listing.folders[0] if len(listing.folders) == 1 else None
        if split is None:
            there = ", ".join(map(printable, listing.folders)) or "nothing"
            raise UsageError(f"data: {fs.location} has no split called train, but {there}: give the folder of one")
        fs = LocalFileSystem(fs.root / split)
        listing = fs.list_dir()
    return _read_dataset(fs, listing, labels)


def _read_dataset(fs: LocalFileSystem, listing: DirListing, labels: bool) -> ArrowSource:
    files = _data_files(fs, listing)
    table, features = _load_table(fs)
    column = _image_column(features, fs.location)
    mark = repr([(name, fs.size(name)) for name in files]).encode() + fs.read(_STATE_FILE)
    numbers, classes = _read_labels(table, features, fs.location) if labels else (None, ())
    if not len(table):
        raise UsageError(f"data: {fs.location} has no image: give at least one")
    return ArrowSource(fs.location, table.column(column), numbers, classes, mark)


def _data_files(fs: LocalFileSystem, listing: DirListing) -> list[str]:
    """The Arrow files that the set names, all of which must lie in its folder."""
    try:
        names = [file["filename"] for file in json.loads(fs.read(_STATE_FILE))["_data_files"]]
        strange = next((name for name in names if not isinstance(name, str) or name not in listing.files), None)
    except (ValueError, LookupError, TypeError, RecursionError, DecodeError, FileNotFoundError):
        raise UsageError(
            f"data: {fs.display_path(_STATE_FILE)} is damaged: save the set again with save_to_disk"
        ) from None
    if strange is not None or not names:
        missing = "no file" if strange is None else f"{printable(str(strange))[:80]}, which does not lie beside it"
        raise UsageError(f"data: {fs.display_path(_STATE_FILE)} names {missing}: save the set again with save_to_disk")
    return names


def _load_table(fs: LocalFileSystem) -> tuple[Any, Any]:
    """The Arrow table, checked throughout, and what its columns are."""
    try:
        import datasets  # slow to import, and not everybody has it
    except ImportError:
        remedy = "pip install 'paragan[huggingface]'"
        raise UsageError(f"data: {fs.location} is a set of Hugging Face's `datasets`: {remedy} to read it") from None
    with _reraise_as_usage_error(fs.location), _without_progress_bars(datasets):
        found = datasets.Dataset.load_from_disk(str(Path(fs.root).absolute()), keep_in_memory=False)
        for name, feature in found.features.items():
            if isinstance(feature, datasets.Image):
                found = found.cast_column(name, datasets.Image(decode=False))
        table = found.data.table
        table.validate(full=True)  # or a damaged file would be read beyond its end
        return table, found.features


def _image_column(features: Any, location: str) -> str:
    found = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if not found:
        raise UsageError(
            f"data: {location} has no column of images, only {_format_columns(features)}: cast one to datasets.Image()"
        )
    chosen = found if len(found) == 1 else [name for name in _IMAGE_COLUMNS if name in found]
    if not chosen:
        raise UsageError(
            f"data: {location} has several columns of images ({_format_columns(features)}): call one of them image"
        )
    return chosen[0]


def _read_labels(table: Any, features: Any, location: str) -> tuple[np.ndarray | None, tuple[str, ...]]:
    named = {name: f for name, f in features.items() if type(f).__name__ == "ClassLabel"}
    whole = [
        name for name in _LABEL_COLUMNS if str(getattr(features.get(name), "dtype", "")).lstrip("u").startswith("int")
    ]
    found = list(named) if len(named) == 1 else [name for name in _LABEL_COLUMNS if name in named]
    if named and not found:
        raise UsageError(
            f"data: {location} has several columns of classes ({_format_columns(features)}): call one of them label"
        )
    column = next(iter([*found, *whole]), None)
    if column is None:
        return None, ()
    values = table.column(column)
    if values.null_count:
        raise UsageError(
            f"data: {location}: {values.null_count:,} of {len(values):,} images have no {column}: filter them out"
        )
    labels = values.to_numpy().astype(np.int64)
    names = getattr(features[column], "names", None)
    check_labels(labels, location, len(names) if names else None)
    classes = names or [str(label) for label in range(int(labels.max()) + 1)]
    return labels, tuple(printable(str(name)) for name in classes)


def _format_columns(features: Any) -> str:
    return printable(", ".join(f"{name}: {type(feature).__name__}" for name, feature in list(features.items())[:20]))


@contextmanager
def _without_progress_bars(datasets: Any) -> Iterator[None]:
    """No progress bars."""
    shows = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shows:
            datasets.enable_progress_bars()


@contextmanager
def _reraise_as_usage_error(location: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # `datasets` and Arrow raise anything on damaged files
        raise UsageError(
            f"data: {location} cannot be read by `datasets` ({format_error(error)}): save it again with save_to_disk"
        ) from None
