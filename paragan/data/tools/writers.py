"""Writers of data sets, one for each format. Equal data sets become equal files."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.dataset_json import CLASSES_JSON, DATASET_JSON
from paragan.data.source import Record
from paragan.data.tools.image_info import FORMAT_SUFFIXES, detect_format
from paragan.data.tools.shard_writer import TarShardWriter

OUTPUT_FORMATS_HINT = "a folder (a name without extension), .npz, .zip, .h5, or --to tars"

_H5_BATCH_IMAGES = 64  # images written at once into an .h5
_DATE = (1980, 1, 1, 0, 0, 0)  # of all members of an archive, so that equal data sets are equal files
_RESERVED_CHARS = set('/\\:*?"<>|')  # by some file system
_MAX_NAME_BYTES = 100


@dataclass(frozen=True, eq=False)
class DatasetInfo:
    """What a writer is told in advance.

    count   : images
    labels  : [count] int64 in 0..K-1, or None
    classes : [K] names
    shape   : (H, W, C) of every image, for formats that store pixels
    """

    count: int
    labels: np.ndarray | None
    classes: tuple[str, ...]
    shape: tuple[int, int, int] | None = None


class Writer(Protocol):
    """Writes the images of a data set, in order."""

    def add(self, record: Record) -> None:
        """Write the next image: an encoded file, or pixels [H, W, C]."""
        ...

    def close(self) -> None:
        """Finish the file or folder."""
        ...


@dataclass(frozen=True)
class OutputFormat:
    """A format of data sets.

    stores_pixels        : it stores arrays of one shape rather than encoded files
    allows_empty_classes : it can store a class without images
    make_writer          : (path of the file or folder, what is known in advance) -> writer
    """

    name: str
    stores_pixels: bool
    allows_empty_classes: bool
    make_writer: Callable[[Path, DatasetInfo], Writer]


class FolderWriter:
    """Writes `out/<class>/00000000.png`, or `out/00000000.png` without labels."""

    def __init__(self, out: Path, info: DatasetInfo):
        self.labels = info.labels
        self.num_written = 0
        self.folders = [out] if info.labels is None else [out / name for name in folder_names(info.classes)]
        for folder in self.folders:
            folder.mkdir(parents=True)

    def add(self, record: Record) -> None:
        """Write the next image."""
        assert isinstance(record, bytes)
        folder = self.folders[0 if self.labels is None else int(self.labels[self.num_written])]
        (folder / f"{self.num_written:08d}{FORMAT_SUFFIXES[detect_format(record)]}").write_bytes(record)
        self.num_written += 1

    def close(self) -> None:
        """Do nothing: every file is complete."""


class ZipWriter:
    """Writes the layout of StyleGAN and EDM: `00000/img00000000.png`, stored, and dataset.json; also classes.json."""

    def __init__(self, out: Path, info: DatasetInfo):
        self.archive = zipfile.ZipFile(out, "w")
        self.info = info
        self.names: list[str] = []

    def add(self, record: Record) -> None:
        """Write the next image."""
        assert isinstance(record, bytes)
        number = f"{len(self.names):08d}"
        self.names.append(f"{number[:5]}/img{number}{FORMAT_SUFFIXES[detect_format(record)]}")
        self.archive.writestr(zipfile.ZipInfo(self.names[-1], _DATE), record)

    def close(self) -> None:
        """Write the labels and close the archive."""
        labels = None if self.info.labels is None else list(zip(self.names, self.info.labels.tolist()))
        with self.archive:
            self._write_json(DATASET_JSON, {"labels": labels})
            if labels:
                self._write_json(CLASSES_JSON, list(self.info.classes))

    def _write_json(self, name: str, content: object) -> None:
        self.archive.writestr(zipfile.ZipInfo(name, _DATE), json.dumps(content))


class NpzWriter:
    """Writes `images` uint8 [N, H, W, C], `labels` int64 [N] and `classes` [K] names, without holding the images."""

    def __init__(self, out: Path, info: DatasetInfo):
        assert info.shape
        self.info = info
        self.archive = zipfile.ZipFile(out, "w")
        self.images = self.archive.open(zipfile.ZipInfo("images.npy", _DATE), "w", force_zip64=True)
        header = {"descr": "|u1", "fortran_order": False, "shape": (info.count, *info.shape)}
        np.lib.format.write_array_header_1_0(self.images, header)  # pyright: ignore[reportArgumentType]

    def add(self, record: Record) -> None:
        """Write the pixels of the next image."""
        assert isinstance(record, np.ndarray)
        self.images.write(record.tobytes())

    def close(self) -> None:
        """Write labels and classes and close the archive."""
        with self.archive:
            self.images.close()
            if self.info.labels is not None:
                self._write_array("labels", self.info.labels)
                self._write_array("classes", np.array(self.info.classes, dtype=str))

    def _write_array(self, name: str, array: np.ndarray) -> None:
        data = io.BytesIO()
        np.lib.format.write_array(data, array, allow_pickle=False)
        self.archive.writestr(zipfile.ZipInfo(f"{name}.npy", _DATE), data.getvalue())


class H5Writer:
    """Writes BigGAN's `imgs` uint8 [N, C, H, W] and `labels` int64 [N], and `classes` [K] names."""

    def __init__(self, out: Path, info: DatasetInfo):
        import h5py  # slow to import

        assert info.shape
        height, width, channels = info.shape
        self.file = h5py.File(out, "w")
        self.images = self.file.create_dataset("imgs", (info.count, channels, height, width), np.uint8)
        if info.labels is not None:
            self.file["labels"] = info.labels
            self.file["classes"] = np.array([name.encode(errors="replace") for name in info.classes])
        self.buffer: list[np.ndarray] = []
        self.num_written = 0

    def add(self, record: Record) -> None:
        """Write the pixels of the next image."""
        assert isinstance(record, np.ndarray)
        self.buffer.append(record.transpose(2, 0, 1))
        if len(self.buffer) == _H5_BATCH_IMAGES:
            self._flush()

    def close(self) -> None:
        """Write the buffered images and close the file."""
        self._flush()
        self.file.close()

    def _flush(self) -> None:
        if self.buffer:
            self.images[self.num_written : self.num_written + len(self.buffer)] = np.stack(self.buffer)
        self.num_written += len(self.buffer)
        self.buffer.clear()


def tar_format(shard_mb: float) -> OutputFormat:
    """Return the format of WebDataset shards of about `shard_mb` million bytes at most."""
    return OutputFormat("tars", False, True, lambda out, info: TarShardWriter(out, info.labels, info.classes, shard_mb))


OUTPUT_FORMATS = {
    "folder": OutputFormat("folder", False, False, FolderWriter),
    "npz": OutputFormat("npz", True, True, NpzWriter),
    "zip": OutputFormat("zip", False, True, ZipWriter),
    "h5": OutputFormat("h5", True, True, H5Writer),
}
_SUFFIX_FORMATS = {"": "folder", ".npz": "npz", ".zip": "zip", ".h5": "h5", ".hdf5": "h5"}


def choose_format(out: Path, name: str | None = None, shard_mb: float = 64) -> OutputFormat:
    """Return an output format.

    Args:
        out: its extension decides if `name` is None.
        name: folder, npz, zip, h5 or tars.
        shard_mb: size limit of a tar shard, in million bytes.

    Raises:
        UsageError: the extension is not known.
    """
    if name is None and out.suffix.lower() not in _SUFFIX_FORMATS:
        raise UsageError(f"{out}: ends in {out.suffix}, which is not a supported format. Use {OUTPUT_FORMATS_HINT}")
    name = name or _SUFFIX_FORMATS[out.suffix.lower()]
    return tar_format(shard_mb) if name == "tars" else OUTPUT_FORMATS[name]


def folder_names(classes: Sequence[str]) -> list[str]:
    """Return a folder name for each class.

    If sanitized names would not be unique, or would sort differently, all begin with the number of the class.
    """
    names = [sanitize_name(name) for name in classes]
    if names == sorted(names) and len({name.casefold() for name in names}) == len(names):
        return names
    width = len(str(len(names) - 1))
    return [_prefix_number(f"{number:0{width}d}", name) for number, name in enumerate(names)]


def sanitize_name(name: str) -> str:
    """Return a name that every file system accepts as one visible folder; never empty."""
    safe = "".join(char if char.isprintable() and char not in _RESERVED_CHARS else "_" for char in name)
    safe = safe.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").strip(" ")
    if safe.startswith("."):  # hidden folders are ignored
        safe = "_" + safe[1:]
    return safe.rstrip(". ") or "_"


def _prefix_number(number: str, name: str) -> str:
    """Return `number-name`; a name that is the number itself is only padded with zeros."""
    is_same_number = name.isdecimal() and name.lstrip("0") == number.lstrip("0")
    return number if is_same_number else f"{number}-{name}"
