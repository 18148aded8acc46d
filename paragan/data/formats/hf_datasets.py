"""A set as Hugging Face's `datasets` leaves it on disk (`save_to_disk`)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paragan.core.errors import Unusable
from paragan.data.formats.npz import check_labels
from paragan.data.formats.read_span import LARGEST
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import Entries, Place, one_line, shown
from paragan.data.storage.local import Here

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
_IMAGES, _LABELS = ("image", "img"), ("label", "labels", "fine_label")  # names that decide where several columns could


class Arrow:
    """Images in Arrow files, as the bytes that were saved. `datasets` maps them; nothing is decoded or run by it."""

    near, whole = True, None

    def __init__(self, where: str, images: Any, labels: np.ndarray | None, classes: tuple[str, ...], mark: bytes):
        self.where, self.images, self.mark = where, images, mark
        self.labels, self.classes, self.notes = labels, classes, ()

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> bytes:
        try:
            data = self.images[index].as_py()["bytes"]
        except Exception as error:  # whatever Arrow minds
            raise DecodeError(one_line(error)) from None
        if not isinstance(data, bytes):
            raise DecodeError("its bytes are not in the set, only its path: save it again with the images in it")
        if len(data) > LARGEST:
            raise DecodeError(f"takes {len(data):,} bytes, more than any image ({LARGEST:,})")
        return data

    def name(self, index: int) -> str:
        return f"{self.where}, row {index}"

    def identity(self) -> Iterable[bytes]:
        yield self.mark


def is_arrow(here: Entries) -> bool:
    """Whether a folder is one that `save_to_disk` left."""
    return _SPLITS in here.files or {_STATE, _INFO} <= here.files.keys()


def arrow(place: Place, here: Entries, *, labels: bool = True) -> Arrow:
    """The set in a folder of `save_to_disk`; of several splits the one called train."""
    if place.remote or not isinstance(place, Here):
        raise Unusable(f"data: {place.where} is a set of `datasets`, read from this machine only: copy it here first")
    if _SPLITS in here.files:
        split = "train" if "train" in here.folders else here.folders[0] if len(here.folders) == 1 else None
        if split is None:
            there = ", ".join(map(shown, here.folders)) or "nothing"
            raise Unusable(f"data: {place.where} has no split called train, but {there}: give the folder of one")
        place = Here(place.path / split)
        here = place.entries()
    return _read(place, here, labels)


def _read(place: Here, here: Entries, labels: bool) -> Arrow:
    files = _files(place, here)
    table, features = _table(place)
    column = _image_column(features, place.where)
    mark = repr([(name, place.size(name)) for name in files]).encode() + place.read(_STATE)
    numbers, classes = _labels(table, features, place.where) if labels else (None, ())
    if not len(table):
        raise Unusable(f"data: {place.where} has no image: give at least one")
    return Arrow(place.where, table.column(column), numbers, classes, mark)


def _files(place: Here, here: Entries) -> list[str]:
    """The Arrow files that the set names, all of which must lie in its folder."""
    try:
        names = [file["filename"] for file in json.loads(place.read(_STATE))["_data_files"]]
        strange = next((name for name in names if not isinstance(name, str) or name not in here.files), None)
    except (ValueError, LookupError, TypeError, RecursionError, DecodeError, FileNotFoundError):
        raise Unusable(f"data: {place.at(_STATE)} is damaged: save the set again with save_to_disk") from None
    if strange is not None or not names:
        missing = "no file" if strange is None else f"{shown(str(strange))[:80]}, which does not lie beside it"
        raise Unusable(f"data: {place.at(_STATE)} names {missing}: save the set again with save_to_disk")
    return names


def _table(place: Here) -> tuple[Any, Any]:
    """The Arrow table, checked throughout, and what its columns are."""
    try:
        import datasets  # slow to import, and not everybody has it
    except ImportError:
        remedy = "pip install 'paragan[huggingface]'"
        raise Unusable(f"data: {place.where} is a set of Hugging Face's `datasets`: {remedy} to read it") from None
    with _reading(place.where), _quiet(datasets):
        found = datasets.Dataset.load_from_disk(str(Path(place.path).absolute()), keep_in_memory=False)
        for name, feature in found.features.items():
            if isinstance(feature, datasets.Image):
                found = found.cast_column(name, datasets.Image(decode=False))
        table = found.data.table
        table.validate(full=True)  # or a damaged file would be read beyond its end
        return table, found.features


def _image_column(features: Any, where: str) -> str:
    found = [name for name, feature in features.items() if type(feature).__name__ == "Image"]
    if not found:
        raise Unusable(
            f"data: {where} has no column of images, only {_columns(features)}: cast one to datasets.Image()"
        )
    chosen = found if len(found) == 1 else [name for name in _IMAGES if name in found]
    if not chosen:
        raise Unusable(f"data: {where} has several columns of images ({_columns(features)}): call one of them image")
    return chosen[0]


def _labels(table: Any, features: Any, where: str) -> tuple[np.ndarray | None, tuple[str, ...]]:
    named = {name: f for name, f in features.items() if type(f).__name__ == "ClassLabel"}
    whole = [name for name in _LABELS if str(getattr(features.get(name), "dtype", "")).lstrip("u").startswith("int")]
    found = list(named) if len(named) == 1 else [name for name in _LABELS if name in named]
    if named and not found:
        raise Unusable(f"data: {where} has several columns of classes ({_columns(features)}): call one of them label")
    column = next(iter([*found, *whole]), None)
    if column is None:
        return None, ()
    values = table.column(column)
    if values.null_count:
        raise Unusable(
            f"data: {where}: {values.null_count:,} of {len(values):,} images have no {column}: filter them out"
        )
    labels = values.to_numpy().astype(np.int64)
    names = getattr(features[column], "names", None)
    check_labels(labels, where, len(names) if names else None)
    classes = names or [str(label) for label in range(int(labels.max()) + 1)]
    return labels, tuple(shown(str(name)) for name in classes)


def _columns(features: Any) -> str:
    return shown(", ".join(f"{name}: {type(feature).__name__}" for name, feature in list(features.items())[:20]))


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bars."""
    shows = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shows:
            datasets.enable_progress_bars()


@contextmanager
def _reading(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # `datasets` and Arrow raise anything on damaged files
        raise Unusable(
            f"data: {where} cannot be read by `datasets` ({one_line(error)}): save it again with save_to_disk"
        ) from None
