"""One writer a format: it is given every image of a set, in order, and closed."""

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
from paragan.data.source import Record
from paragan.data.tools.image_info import FORMAT_SUFFIXES, detect_format
from paragan.data.tools.shard_writer import TarShardWriter

OUTPUT_FORMATS_HINT = "a folder (a name without extension), .npz, .zip, .h5, or --to tars"

_H5_BATCH_IMAGES = 64  # images written at once into an .h5
_DATE = (1980, 1, 1, 0, 0, 0)  # of whatever is in an archive, so that equal sets are equal files


@dataclass(frozen=True, eq=False)
class DatasetInfo:
    """What a writer knows before it is given the first image.

    labels : [count] int64 in 0..K-1, or None;  classes : [K] names
    shape  : (R, R, C) of every image, for writers of pixels
    """

    count: int
    labels: np.ndarray | None
    classes: tuple[str, ...]
    shape: tuple[int, int, int] | None = None


class Writer(Protocol):
    def add(self, record: Record) -> None:
        """The next image: a whole file, or pixels [R, R, C]."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class OutputFormat:
    """A format that sets are written in.

    pixels : whether it holds arrays of one shape, rather than files as they are
    empty  : whether it can tell of a class without images
    make   : of a path, to become a file or a folder, and what is known
    """

    name: str
    stores_pixels: bool
    allows_empty_classes: bool
    make_writer: Callable[[Path, DatasetInfo], Writer]


class FolderWriter:
    """`out/<class>/00000000.png`, or `out/00000000.png` without labels: the same images, class by class."""

    def __init__(self, out: Path, info: DatasetInfo):
        self.labels, self.num_written = info.labels, 0
        self.folders = [out] if info.labels is None else [out / name for name in folder_names(info.classes)]
        for folder in self.folders:
            folder.mkdir(parents=True)

    def add(self, record: Record) -> None:
        assert isinstance(record, bytes)
        folder = self.folders[0 if self.labels is None else int(self.labels[self.num_written])]
        (folder / f"{self.num_written:08d}{FORMAT_SUFFIXES[detect_format(record)]}").write_bytes(record)
        self.num_written += 1

    def close(self) -> None:
        pass


class ZipWriter:
    """As StyleGAN and EDM have it: `00000/img00000000.png`, stored, and dataset.json; names of classes beside it."""

    def __init__(self, out: Path, info: DatasetInfo):
        self.archive = zipfile.ZipFile(out, "w")
        self.info, self.names = info, list[str]()

    def add(self, record: Record) -> None:
        assert isinstance(record, bytes)
        number = f"{len(self.names):08d}"
        self.names.append(f"{number[:5]}/img{number}{FORMAT_SUFFIXES[detect_format(record)]}")
        self.archive.writestr(zipfile.ZipInfo(self.names[-1], _DATE), record)

    def close(self) -> None:
        labels = None if self.info.labels is None else list(zip(self.names, self.info.labels.tolist()))
        with self.archive:
            self._write_json("dataset.json", {"labels": labels})
            if labels:
                self._write_json("classes.json", list(self.info.classes))

    def _write_json(self, name: str, what: object) -> None:
        self.archive.writestr(zipfile.ZipInfo(name, _DATE), json.dumps(what))


class NpzWriter:
    """`images` uint8 [N, R, R, C], `labels` int64 [N], `classes` [K] names: an array after the other, as they come."""

    def __init__(self, out: Path, info: DatasetInfo):
        assert info.shape
        self.info = info
        self.archive = zipfile.ZipFile(out, "w")
        self.images = self.archive.open(zipfile.ZipInfo("images.npy", _DATE), "w", force_zip64=True)
        header = {"descr": "|u1", "fortran_order": False, "shape": (info.count, *info.shape)}
        np.lib.format.write_array_header_1_0(self.images, header)  # pyright: ignore[reportArgumentType]

    def add(self, record: Record) -> None:
        assert isinstance(record, np.ndarray)
        self.images.write(record.tobytes())

    def close(self) -> None:
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
    """`imgs` uint8 [N, C, R, R], as BigGAN's, `labels` int64 [N] and `classes` [K] names."""

    def __init__(self, out: Path, info: DatasetInfo):
        import h5py  # slow to import, and only needed here

        assert info.shape
        side, _, channels = info.shape
        self.file = h5py.File(out, "w")
        self.images = self.file.create_dataset("imgs", (info.count, channels, side, side), np.uint8)
        if info.labels is not None:
            self.file["labels"] = info.labels
            self.file["classes"] = np.array([name.encode(errors="replace") for name in info.classes])
        self.buffer: list[np.ndarray] = []
        self.num_written = 0

    def add(self, record: Record) -> None:
        assert isinstance(record, np.ndarray)
        self.buffer.append(record.transpose(2, 0, 1))
        if len(self.buffer) == _H5_BATCH_IMAGES:
            self._flush()

    def close(self) -> None:
        self._flush()
        self.file.close()

    def _flush(self) -> None:
        if self.buffer:
            self.images[self.num_written : self.num_written + len(self.buffer)] = np.stack(self.buffer)
        self.num_written += len(self.buffer)
        self.buffer.clear()


def tar_format(shard_mb: float) -> OutputFormat:
    """WebDataset shards of at most about that many million bytes."""
    return OutputFormat(
        "tars", False, True, lambda out, whole: TarShardWriter(out, whole.labels, whole.classes, shard_mb)
    )


OUTPUT_FORMATS = {
    "folder": OutputFormat("folder", False, False, FolderWriter),
    "npz": OutputFormat("npz", True, True, NpzWriter),
    "zip": OutputFormat("zip", False, True, ZipWriter),
    "h5": OutputFormat("h5", True, True, H5Writer),
}
_SUFFIX_FORMATS = {"": "folder", ".npz": "npz", ".zip": "zip", ".h5": "h5", ".hdf5": "h5"}


def choose_format(out: Path, name: str | None = None, shard_mb: float = 64) -> OutputFormat:
    """The format `name`, or the one that the end of `out` means. Raises `Unusable` for another."""
    if name is None and out.suffix.lower() not in _SUFFIX_FORMATS:
        raise UsageError(f"{out} ends in {out.suffix}, no format that is written here: use {OUTPUT_FORMATS_HINT}")
    name = name or _SUFFIX_FORMATS[out.suffix.lower()]
    return tar_format(shard_mb) if name == "tars" else OUTPUT_FORMATS[name]


_RESERVED_CHARS = set('/\\:*?"<>|')  # by some file system or other


_MAX_NAME_BYTES = 100  # bytes


def folder_names(classes: Sequence[str]) -> list[str]:
    """One for each class. Where the plain names would be equal, or sorted otherwise, all begin with their number."""
    plain = [sanitize_name(name) for name in classes]
    if plain == sorted(plain) and len({name.casefold() for name in plain}) == len(plain):
        return plain
    width = len(str(len(plain) - 1))
    return [_prefix_number(f"{number:0{width}d}", name) for number, name in enumerate(plain)]


def sanitize_name(name: str) -> str:
    """What of a name every file system takes as one visible folder; never empty."""
    kept = "".join(char if char.isprintable() and char not in _RESERVED_CHARS else "_" for char in name)
    kept = kept.encode()[:_MAX_NAME_BYTES].decode(errors="ignore").strip(" ")
    kept = "_" + kept[1:] if kept.startswith(".") else kept  # hidden files do not count
    return kept.rstrip(". ") or "_"


def _prefix_number(number: str, name: str) -> str:
    """Numbers themselves only get their zeros."""
    return number if name.isdecimal() and name.lstrip("0") == number.lstrip("0") else f"{number}-{name}"
