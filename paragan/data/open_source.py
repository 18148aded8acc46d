"""Which set of images a name means."""

from __future__ import annotations

import difflib
from pathlib import Path

from paragan.core.errors import UsageError
from paragan.data.formats.array import load_digits
from paragan.data.formats.cifar import is_cifar, open_cifar
from paragan.data.formats.dataset_json import DATASET_JSON, open_labelled_folder
from paragan.data.formats.hdf5 import open_hdf5
from paragan.data.formats.hf_datasets import is_hf_dataset, open_hf_dataset
from paragan.data.formats.image_folder import format_extensions, open_image_folder
from paragan.data.formats.npz import read_npy, read_npz
from paragan.data.formats.webdataset import is_shard_pattern, list_shards, open_from_index, open_tar_shards
from paragan.data.formats.zip_archive import open_zip
from paragan.data.source import IMAGE_FORMATS, Source
from paragan.data.storage.filesystem import (
    FileSystem,
    RemoteOptions,
    is_url,
    printable,
    redact_url,
    require_credentials,
)
from paragan.data.storage.open_location import open_location

SOURCE_FORMATS_HINT = (
    "`digits`, an .npz, .npy, .zip or .h5, .tar shards (shard-*.tar, shard-{000..012}.tar), or a folder: of images "
    f"({', '.join(IMAGE_FORMATS)}), of a folder each class, of tars, of CIFAR, or one that Hugging Face `datasets` saved"
)


def open_source(location: str, remote: RemoteOptions | None = None, *, labels: bool = True) -> Source:
    """The set that `where` names: a word, a path, or an address. Raises `Unusable` for what is none."""
    if not location:
        raise UsageError(f"data: nothing is named: give {SOURCE_FORMATS_HINT}")
    if location == "digits":
        return load_digits()
    require_credentials(location)
    far = is_url(location)
    if (far or not Path(location).exists()) and is_shard_pattern(location):
        return _open_pattern(location, remote, labels)
    if not far and not Path(location).exists():
        raise UsageError(_missing_message(Path(location)))
    place, name = open_location(location, remote)
    return _open_file(place, name, remote, labels) if name else _open_folder(place, remote, labels)


def _open_pattern(location: str, remote: RemoteOptions | None, labels: bool) -> Source:
    above, _, pattern = location.rpartition("/")
    if is_shard_pattern(above):
        raise UsageError(
            f"data: {printable(redact_url(location))} has * or {{..}} in a folder's name: only the last name may have them"
        )
    if not is_url(location) and not Path(above or ".").is_dir():
        raise UsageError(_missing_message(Path(above)))
    if not pattern.lower().endswith(".tar"):
        raise UsageError(
            f"data: {printable(redact_url(location))} is not about .tar files: give such as shard-*.tar, or {SOURCE_FORMATS_HINT}"
        )
    place, _ = open_location(f"{above}/" if above or location.startswith("/") else ".", remote)
    return open_tar_shards(place, pattern, remote, labels=labels)


def _open_folder(fs: FileSystem, remote: RemoteOptions | None, labels: bool) -> Source:
    try:
        here = fs.list_dir()
    except UsageError:
        found = open_from_index(fs, remote, labels=labels) if fs.is_remote else None
        if found is None:
            raise
        return found
    if is_hf_dataset(here):
        return open_hf_dataset(fs, here, labels=labels)
    if DATASET_JSON in here.files:
        return open_labelled_folder(fs, here, labels=labels)
    if list_shards(here):
        return open_tar_shards(fs, "*.tar", remote, labels=labels)
    if is_cifar(here):
        return open_cifar(fs, here, labels=labels)
    return open_image_folder(fs, here)


def _open_file(fs: FileSystem, name: str, remote: RemoteOptions | None, labels: bool) -> Source:
    suffix, where = Path(name).suffix.lower(), fs.display_path(name)
    if suffix == ".npz":
        return read_npz(fs, name, labels=labels)
    if suffix == ".npy":
        return read_npy(fs, name)
    if suffix == ".zip":
        return open_zip(fs, name, labels=labels)
    if suffix in (".h5", ".hdf5"):
        return open_hdf5(fs, name, labels=labels)
    if suffix == ".tar":
        return open_tar_shards(fs, name, remote, labels=labels)
    if suffix in IMAGE_FORMATS:
        raise UsageError(f"data: {where} is one image: give the folder it lies in, {fs.location}")
    raise UsageError(f"data: {where} has {format_extensions([name])}, no format known here: give {SOURCE_FORMATS_HINT}")


def _missing_message(path: Path) -> str:
    """Name what does not exist: the first part of the path that is missing, and what is there instead."""
    lost = path
    while lost.parent != lost and not lost.parent.exists():
        lost = lost.parent
    there = [printable(entry.name) for entry in lost.parent.iterdir()] if lost.parent.is_dir() else []
    near = difflib.get_close_matches(lost.name, [*there, "digits"], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"give {SOURCE_FORMATS_HINT}"
    inside = "" if lost == path else f" (there is no {printable(lost)})"
    return f"data: {printable(path)} does not exist{inside}: {hint}"
