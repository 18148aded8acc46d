"""Open the data set that a name, a path or an address means: finds its format."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from paragan.core.errors import RunError, UsageError
from paragan.data.formats import hdf5_records, npz_records
from paragan.data.formats.array import load_digits
from paragan.data.formats.class_labels import no_label_key_error
from paragan.data.formats.dataset_json import DATASET_JSON, is_image, open_labelled_folder
from paragan.data.formats.hdf5 import open_hdf5
from paragan.data.formats.hf_datasets import is_hf_dataset, open_hf_dataset
from paragan.data.formats.image_folder import OuterFolder, format_extensions, open_image_folder
from paragan.data.formats.label_files import resembles_labels
from paragan.data.formats.npz import read_npy, read_npz
from paragan.data.formats.parquet import SUFFIX as PARQUET_SUFFIX
from paragan.data.formats.parquet import find_parquet_files, open_parquet
from paragan.data.formats.record_files import (
    AUDIO_FORMATS,
    FolderFiles,
    TarFiles,
    ZipFiles,
    has_record_files,
    open_record_files,
    walk_files,
)
from paragan.data.formats.record_source import RecordSelection
from paragan.data.formats.webdataset import is_shard_pattern, list_shards, open_from_index, open_tar_shards, shard_sizes
from paragan.data.formats.zip_archive import ZipArchive, open_zip
from paragan.data.source import IMAGE_FORMATS, DecodeError, LabelChoice, NoImagesError, Source
from paragan.data.storage.filesystem import (
    DirListing,
    FileSystem,
    RemoteOptions,
    abbreviate,
    expand_hub_address,
    is_url,
    printable,
    redact_url,
    require_credentials,
)
from paragan.data.storage.open_location import open_location

SOURCE_FORMATS_HINT = (
    "`digits`, an .npz, .npy, .zip, .h5 or .parquet, .tar shards (shard-*.tar, shard-{000..012}.tar), or a folder: of "
    f"images ({', '.join(IMAGE_FORMATS)}), of a folder for each class, of tars, of .parquet, one that Hugging Face "
    "`datasets` saved, or hf://user/name"
)

RUN_FILE = "run.yaml"  # of the folders that training writes
MAX_OUTER_FOLDERS = 4  # around the folder that holds the data


@dataclass(frozen=True)
class Opening:
    """The arguments of `open_source`."""

    remote: RemoteOptions | None
    labels: LabelChoice
    channels: int | None
    records: RecordSelection


def open_source(
    location: str,
    remote: RemoteOptions | None = None,
    *,
    labels: LabelChoice = True,
    channels: int | None = None,
    records: RecordSelection | None = None,
) -> Source:
    """Open a data set; a `RecordSource` if its records are several arrays.

    Args:
        location: the word `digits`, a path, an address, or a pattern of tar shards.
        remote: options for remote storage.
        labels: False does not read labels; a str is the key or column that holds them.
        channels: of arrays, if these are neither grey nor RGB.
        records: how records of several arrays are read.

    Raises:
        UsageError: it does not exist, or is not a data set of a supported format.
    """
    if not location:
        raise UsageError(f"data: no location is given. Give {SOURCE_FORMATS_HINT}")
    if location == "digits":
        _without_key(labels, location)
        return load_digits()
    require_credentials(location)
    location = expand_hub_address(location)
    exists = is_url(location) or Path(location).exists()
    opening = Opening(remote, labels, channels, records or RecordSelection())
    if is_shard_pattern(location) and (is_url(location) or not exists):
        return _open_pattern(location, opening)
    if not exists:
        raise UsageError(_missing_message(Path(location)))
    fs, name = open_location(location, remote)
    return _open_file(fs, name, opening) if name else _open_folder(fs, location, opening)


def open_checked_source(location: str, *, labels: LabelChoice = True, channels: int | None = None) -> Source:
    """Open a data set as `open_source` does; whatever keeps it from being read is a UsageError."""
    try:
        return open_source(location, labels=labels, channels=channels)
    except DecodeError as error:
        raise UsageError(f"data: {printable(redact_url(location))}: {error}: check the path or address") from None
    except RunError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        name = printable(error.filename or redact_url(location))
        raise UsageError(
            f"data: {name} cannot be read: {error.strerror or error}; check path and permissions"
        ) from None


def _join_location(location: str, folder: str) -> str:
    """Return the path or address of a folder in `location`."""
    if not is_url(location):
        return str(Path(location, folder))
    is_http = location.lower().startswith("http")
    address, mark, query = location.partition("#")[0].partition("?") if is_http else (location, "", "")
    return f"{address.rstrip('/')}/{quote(folder, errors='surrogateescape') if is_http else folder}/{mark}{query}"


def _open_pattern(location: str, opening: Opening) -> Source:
    display_name = printable(redact_url(location))
    folder, _, pattern = location.rpartition("/")
    if is_shard_pattern(folder):
        raise UsageError(
            f"data: {display_name} has * or {{..}} in the name of a folder: only the last name may have them"
        )
    if not is_url(location) and not Path(folder or ".").is_dir():
        raise UsageError(_missing_message(Path(folder)))
    if not pattern.lower().endswith(".tar"):
        raise UsageError(
            f"data: {display_name} is not a pattern of .tar files. Give one such as shard-*.tar, "
            f"or {SOURCE_FORMATS_HINT}"
        )
    fs, _ = open_location(f"{folder}/" if folder or location.startswith("/") else ".", opening.remote)
    return _open_shards(fs, pattern, opening, display_name)


def _open_shards(fs: FileSystem, pattern: str, opening: Opening, display_name: str) -> Source:
    """Open tar shards: of images, or of records if a field was named or there is no image."""
    labels = _without_key(opening.labels, display_name)
    try:
        if not opening.records.field:
            return open_tar_shards(fs, pattern, opening.remote, labels=labels)
    except NoImagesError:
        files = TarFiles(fs, shard_sizes(fs, pattern))
        if not has_record_files(files.names, opening.records):
            raise
        return open_record_files(files, labels, opening.records)
    return open_record_files(TarFiles(fs, shard_sizes(fs, pattern)), labels, opening.records)


def _open_folder(fs: FileSystem, location: str, opening: Opening, outer: tuple[OuterFolder, ...] = ()) -> Source:
    """Open a folder, or the one around which it lies: the only folder of a folder without images is no class.

    outer: the folders that were opened before.
    """
    labels = opening.labels
    try:
        listing = fs.list_dir()
    except UsageError:  # a server that does not list folders
        read_labels = _without_key(labels, fs.location)
        source = open_from_index(fs, opening.remote, labels=read_labels) if fs.is_remote else None
        if source is None:
            raise
        return source
    if RUN_FILE in listing.files and "checkpoints" in listing.folders:
        raise UsageError(
            f"data: {fs.location} is a run. Use its samples: "
            f"`paragan sample {fs.location} --count 5000 --out fakes.npz`"
        )
    if is_hf_dataset(listing):
        return open_hf_dataset(fs, listing, labels=labels)
    if DATASET_JSON in listing.files:
        return open_labelled_folder(fs, listing, labels=_without_key(labels, fs.location))
    parquet_files = find_parquet_files(listing)
    if parquet_files and not list_shards(listing) and not any(map(is_image, listing.files)):
        return open_parquet(fs, parquet_files, labels=labels)
    if list_shards(listing):
        source = _open_shards(fs, "*.tar", opening, fs.location)
        tables = [name for name in listing.files if resembles_labels(name)]
        if labels and source.labels is None and tables:
            raise UsageError(
                f"data: {fs.display_path(tables[0])} looks like labels, and those of shards are members of them, such "
                "as 0001.cls. Write them so, or use --data.labels=false"
            )
        return source
    if "data_batch_1" in listing.files or {"train", "meta"} <= listing.files.keys():
        raise UsageError(
            f"data: {fs.location}: CIFAR in pickles, which are never loaded, since that can run code. Use an npz: "
            "np.savez('cifar.npz', images=x.data, labels=x.targets, classes=x.classes) of torchvision's x=CIFAR10(...)"
        )
    is_outer = len(listing.folders) == 1 and not any(map(is_image, listing.files))
    if is_outer and len(outer) < MAX_OUTER_FOLDERS:
        (folder,) = listing.folders
        inner = _join_location(location, folder)
        level = OuterFolder(fs, listing, f"{folder}/")
        source = _open_folder(open_location(inner, opening.remote)[0], inner, opening, (*outer, level))
        if ignored := listing.files.keys() - level.used:
            note = f"ignored files beside {printable(folder)} ({len(ignored):,}): "
            source.notes = (*source.notes, note + format_extensions(ignored))
        return source
    return _open_images_or_records(fs, listing, opening, outer)


def _open_images_or_records(
    fs: FileSystem, listing: DirListing, opening: Opening, outer: tuple[OuterFolder, ...]
) -> Source:
    """Open a folder of files: images, or records if a field was named or there is no image."""
    labels = opening.labels
    try:
        if not opening.records.field:
            return open_image_folder(fs, listing, labels=labels, outer=outer)
    except NoImagesError:
        files = FolderFiles(fs, walk_files(fs, listing))
        folders = sorted({name.rpartition("/")[0] for name in files.names if name.lower().endswith(PARQUET_SUFFIX)})
        if folders:
            listed = abbreviate(folders, 5)
            raise UsageError(f"data: {fs.location} has Parquet files in several folders ({listed}). Give one") from None
        if not has_record_files(files.names, opening.records):
            raise
        return open_record_files(files, labels, opening.records)
    return open_record_files(FolderFiles(fs, walk_files(fs, listing)), labels, opening.records)


def _open_file(fs: FileSystem, name: str, opening: Opening) -> Source:
    labels, channels = opening.labels, opening.channels
    suffix = Path(name).suffix.lower()
    path = fs.display_path(name)
    if suffix == ".npz":
        if npz_records.holds_records(fs, name, opening.records):
            return npz_records.read_npz_records(fs, name, labels=labels)
        return read_npz(fs, name, labels=labels, channels=channels)
    if suffix == ".npy":
        _without_key(labels, path)
        return read_npy(fs, name, channels=channels)
    if suffix == PARQUET_SUFFIX:
        return open_parquet(fs, [name], labels=labels)
    if suffix == ".zip":
        return _open_zip(fs, name, opening)
    if suffix in (".h5", ".hdf5"):
        if hdf5_records.holds_records(fs, name, opening.records):
            return hdf5_records.open_hdf5_records(fs, name, labels=labels)
        return open_hdf5(fs, name, labels=labels, channels=channels)
    if suffix == ".tar":
        return _open_shards(fs, name, opening, path)
    if suffix in AUDIO_FORMATS:
        raise UsageError(f"data: {path} is one audio file. Give its folder, {fs.location}")
    if suffix in IMAGE_FORMATS:
        raise UsageError(f"data: {path} is one image. Give its folder, {fs.location}")
    raise UsageError(
        f"data: {path} has {format_extensions([name])}, which is not a supported format. Give {SOURCE_FORMATS_HINT}"
    )


def _open_zip(fs: FileSystem, name: str, opening: Opening) -> Source:
    """Open a zip: of images, or of records if a field was named or there is no image."""
    try:
        if not opening.records.field:
            return open_zip(fs, name, labels=opening.labels)
    except NoImagesError:
        files = ZipFiles(ZipArchive(fs, name))
        if not has_record_files(files.names, opening.records):
            raise
        return open_record_files(files, opening.labels, opening.records)
    return open_record_files(ZipFiles(ZipArchive(fs, name)), opening.labels, opening.records)


def _without_key(labels: LabelChoice, location: str) -> bool:
    """Return whether labels are read, of a format that has one place for them."""
    if isinstance(labels, str):
        raise no_label_key_error(labels, location)
    return labels


def _missing_message(path: Path) -> str:
    """Name the first part of a path that does not exist, and similar names that do."""
    missing = path
    while missing.parent != missing and not missing.parent.exists():
        missing = missing.parent
    siblings = [printable(entry.name) for entry in missing.parent.iterdir()] if missing.parent.is_dir() else []
    similar = difflib.get_close_matches(missing.name, [*siblings, "digits"], n=3)
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"give {SOURCE_FORMATS_HINT}"
    detail = "" if missing == path else f" (there is no {printable(missing)})"
    return f"data: {printable(path)} does not exist{detail}: {hint}"
