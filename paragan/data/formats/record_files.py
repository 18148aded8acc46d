"""Records that are files: audio, an `.npz` for each record, or a file for each field, in a folder, a zip or tar shards.

As in WebDataset, files with the same name up to the first dot are one record: `a.wav`, or `a.mel.npy` with
`a.latent.npy`. What stands between the first and the last dot is the name of the field. A folder of `FIELD.npy` without
dots in their names holds an array of all records for each field.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from paragan.core.errors import UsageError
from paragan.data.formats.class_labels import labels_from_folders, sort_class_names, to_nfc
from paragan.data.formats.image_folder import format_extensions, join_path
from paragan.data.formats.read_span import read_span
from paragan.data.formats.record_source import ArrayRecords, RecordSelection, RecordSource
from paragan.data.formats.sample_label import (
    Label,
    is_certain_label,
    missing_labels_error,
    number_labels,
    parse_sample_label,
    unreadable_label_message,
)
from paragan.data.formats.tar_reader import SequentialReader, iter_members
from paragan.data.formats.zip_archive import ZipArchive, ZipMember
from paragan.data.source import IMAGE_FORMATS, DecodeError, LabelChoice
from paragan.data.storage.filesystem import ByteRange, DirListing, FileSystem, is_litter, printable

AUDIO_FORMATS = (".wav", ".flac", ".ogg")
ARRAY_FORMATS = (".npz", ".npy")
RECORD_FORMATS = (*AUDIO_FORMATS, *ARRAY_FORMATS)
MAX_DEPTH = 4  # of folders
_NO_LABEL = -(2**63)
_LABEL_REMEDY = "use --data.label_pattern, or --data.labels=false"


class FileContainer(Protocol):
    """Files in a folder or an archive.

    location  : what messages call it
    is_remote : whether reading takes a network request
    names     : of the files, with `/` between folders
    """

    location: str
    is_remote: bool

    @property
    def names(self) -> Iterable[str]: ...

    def read(self, name: str) -> bytes:
        """Return a file. Raises `DecodeError`."""
        ...

    def display_path(self, name: str) -> str:
        """Return the path or address of a file as messages show it."""
        ...

    def identity(self, name: str) -> str:
        """Return the size and the checksum of a file, as far as they are known without reading it."""
        ...


class FolderFiles:
    """The files of a folder and its folders.

    Args:
        fs: the folder.
        sizes: in bytes, by name; None where the listing did not tell.
    """

    def __init__(self, fs: FileSystem, sizes: Mapping[str, int | None]):
        self.fs = fs
        self.location = fs.location
        self.is_remote = fs.is_remote
        self._sizes = sizes

    @property
    def names(self) -> Iterable[str]:
        """Names relative to the folder."""
        return self._sizes

    def read(self, name: str) -> bytes:
        """Return a file."""
        return read_span(self.fs, name)

    def byte_range(self, name: str) -> ByteRange:
        """Return where a file lies: it is a whole file."""
        return name, 0, None, None

    def display_path(self, name: str) -> str:
        """Return the path or address of a file."""
        return self.fs.display_path(name)

    def identity(self, name: str) -> str:
        """Return the size of a file, if the listing told."""
        size = self._sizes[name]
        if size is None:
            try:
                size = self.fs.size(name)
            except DecodeError:  # it does not exist: reading it will report it
                size = -1
        return str(size)


class ZipFiles:
    """The files of a zip, each verified by its checksum.

    Args:
        archive: the zip.

    Raises:
        UsageError: two files have one name.
    """

    def __init__(self, archive: ZipArchive):
        self.location = archive.location
        self.is_remote = archive.fs.is_remote
        self._archive = archive
        self._members: dict[str, ZipMember] = {}
        for member in archive.members:
            if any(map(is_litter, member.name.split("/"))):
                continue
            if member.name in self._members and _is_part_of_record(member.name):
                raise _twice_error(member.name, self.location, self.location)
            self._members[member.name] = member

    @property
    def names(self) -> Iterable[str]:
        """Names in the archive."""
        return self._members

    def read(self, name: str) -> bytes:
        """Return a file."""
        return self._archive.read(self._members[name])

    def display_path(self, name: str) -> str:
        """Return the path or address of the archive, and the name in it."""
        return f"{self.location}/{printable(name)}"

    def identity(self, name: str) -> str:
        """Return size and checksum."""
        return f"{self._members[name].size} {self._members[name].crc32}"


class TarFiles:
    """The files of tar shards, whose headers are read once.

    Args:
        fs: the folder of the shards.
        shards: name and size in bytes of each.

    Raises:
        UsageError: a shard is damaged, or two files have one name.
    """

    def __init__(self, fs: FileSystem, shards: Mapping[str, int]):
        self.fs = fs
        self.location = fs.location
        self.is_remote = fs.is_remote
        self._places: dict[str, ByteRange] = {}
        self._versions = {shard: fs.version(shard) for shard in shards}
        for shard, size in shards.items():
            for member in iter_members(SequentialReader(fs, shard, size)):
                parts = [part for part in to_nfc(member.name).split("/") if part not in ("", ".")]
                if parts and not any(map(is_litter, parts)):
                    self._add("/".join(parts), (shard, member.offset, member.size, None))

    def _add(self, name: str, place: ByteRange) -> None:
        """Add a file. Raises UsageError if it is part of a record, and another one has its name."""
        if name in self._places and _is_part_of_record(name):
            first, second = (self.fs.display_path(shard) for shard in (self._places[name][0], place[0]))
            raise _twice_error(name, first, second)
        self._places[name] = place

    @property
    def names(self) -> Iterable[str]:
        """Names in the shards."""
        return self._places

    def read(self, name: str) -> bytes:
        """Return a file."""
        return read_span(self.fs, *self._places[name])

    def byte_range(self, name: str) -> ByteRange:
        """Return where a file lies."""
        return self._places[name]

    def display_path(self, name: str) -> str:
        """Return the path or address of the shard, and the name in it."""
        return f"{self.fs.display_path(self._places[name][0])}, {printable(name)}"

    def identity(self, name: str) -> str:
        """Return the shard, its version, and where the file lies."""
        shard, start, size, _ = self._places[name]
        version = "" if self.is_remote else self._versions[shard]
        return f"{shard} {version} {start} {size}"


class FileRecords(RecordSource):
    """Records that are files.

    Args:
        container: of the files.
        records: [N] names of the files of each record by field; "" for a file that says itself what it holds.
        labels: [N] int64 in 0..K-1, or None.
        classes: [K] names.
        notes: lines for `describe`.
    """

    def __init__(
        self,
        container: FileContainer,
        records: Sequence[Mapping[str, str]],
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        super().__init__(container.location, labels, classes, notes, is_local=not container.is_remote)
        self.container = container
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def read(self, index: int) -> bytes | dict[str, bytes]:
        """Return the files of record `index`."""
        files = {field: self.container.read(name) for field, name in self.records[index].items()}
        return files[""] if files.keys() == {""} else files

    def sample_name(self, index: int) -> str:
        """Return the path or address of the first file of record `index`."""
        return self.container.display_path(next(iter(self.records[index].values())))

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names, sizes, and checksums if there are any."""
        for files in self.records:
            for name in files.values():
                yield f"{to_nfc(name)}\0{self.container.identity(name)}\n".encode(errors="surrogateescape")


class SeekableFileRecords(FileRecords):
    """Records of one file each that decode processes read by themselves."""

    def __init__(self, container: FolderFiles | TarFiles, *args: object):
        super().__init__(container, *args)  # pyright: ignore[reportArgumentType]
        self.fs = container.fs
        self._byte_range = container.byte_range

    def byte_ranges(self, index: np.ndarray) -> list[ByteRange]:
        """Return where the files of the records `index` [n] lie."""
        return [self._byte_range(self.records[i][""]) for i in index.tolist()]


def walk_files(fs: FileSystem, listing: DirListing) -> dict[str, int | None]:
    """Return the files of a folder and its folders, MAX_DEPTH deep, with their sizes if the listings tell."""
    sizes: dict[str, int | None] = dict(listing.files)
    level = [(folder, 1) for folder in listing.folders]
    while level:
        folder, depth = level.pop()
        inner = fs.list_dir(folder)
        sizes |= {join_path(folder, name): size for name, size in inner.files.items()}
        if depth < MAX_DEPTH:
            level += [(join_path(folder, name), depth + 1) for name in inner.folders]
    return sizes


def has_record_files(names: Iterable[str], selection: RecordSelection) -> bool:
    """Return whether files are records: audio or arrays; images too if a field was named."""
    suffixes = (*RECORD_FORMATS, *IMAGE_FORMATS) if selection.field else RECORD_FORMATS
    return any(_suffix(name) in suffixes for name in names)


def open_record_files(container: FileContainer, labels: LabelChoice, selection: RecordSelection) -> RecordSource:
    """Open the records that are files of a container.

    Labels come from `label_pattern`, from `.cls` files beside the records, or from class folders.

    Raises:
        UsageError: files or labels do not fit.
    """
    if isinstance(labels, str):
        raise UsageError(f"data.label_key={printable(labels)}: files of records have no keys. Use --data.label_pattern")
    if isinstance(container, FolderFiles) and (arrays := _open_field_arrays(container)):
        return arrays
    files: dict[str, dict[str, str]] = defaultdict(dict)
    label_files: dict[str, dict[str, str]] = defaultdict(dict)
    ignored: list[str] = []
    for name in container.names:
        key, suffix = _split_name(name)
        field = _field_of(suffix, with_images=bool(selection.field))
        if is_certain_label(suffix):
            label_files[key][suffix] = name
        elif field is None:
            ignored.append(name)
        elif field in files[key]:
            raise UsageError(
                f"data: {container.display_path(name)} and {printable(files[key][field])} are one field of one record. "
                "Give them different names before the first dot"
            )
        else:
            files[key][field] = name
    keys = sorted((key for key in files if files[key]), key=to_nfc)
    numbers: np.ndarray | None = None
    classes: tuple[str, ...] = ()
    if labels:
        numbers, classes = _labels_of(container, keys, files, label_files, selection.label_pattern)
    notes = (f"ignored other files ({len(ignored):,}): {format_extensions(ignored)}",) if ignored else ()
    records = [dict(sorted(files[key].items())) for key in keys]
    is_single = all(record.keys() == {""} for record in records)
    if is_single and isinstance(container, FolderFiles | TarFiles):
        return SeekableFileRecords(container, records, numbers, classes, notes)
    return FileRecords(container, records, numbers, classes, notes)


def _open_field_arrays(container: FolderFiles) -> ArrayRecords | None:
    """Open `FIELD.npy` of all records, memory-mapped; None if the files are of another kind."""
    names = [name for name in container.names if _suffix(name) in RECORD_FORMATS]
    if any(_suffix(name) != ".npy" or "/" in name or "." in name[:-4] for name in names):
        return None
    root = container.fs.local_root
    if root is None:
        raise UsageError(f"data: {container.location}: arrays of all records are mapped. Copy them to this machine")
    arrays: dict[str, np.ndarray] = {}
    for name in sorted(names):
        try:
            arrays[name[:-4]] = np.lib.format.open_memmap(root / name, mode="r")
        except (OSError, ValueError, TypeError, SyntaxError, EOFError) as error:
            raise UsageError(
                f"data: {container.display_path(name)} is not an array, or is damaged ({printable(str(error))}): "
                "np.save(path, x)"
            ) from None
    identity = [f"{name} {container.identity(name)} {container.fs.version(name)}".encode() for name in sorted(names)]
    labels = arrays.pop("labels", None)
    records = ArrayRecords(container.location, arrays, identity=identity)
    return records if labels is None else _with_labels(records, np.asarray(labels))


def _with_labels(records: ArrayRecords, labels: np.ndarray) -> ArrayRecords:
    """Return records with the labels of `labels.npy`."""
    from paragan.data.formats.label_arrays import check_label_shape, parse_label_array

    check_label_shape(labels.shape, "labels", records.location, len(records))
    records.labels, records.classes = parse_label_array(labels, "labels", records.location, ())
    return records


def _labels_of(
    container: FileContainer,
    keys: Sequence[str],
    files: Mapping[str, Mapping[str, str]],
    label_files: Mapping[str, Mapping[str, str]],
    pattern: str,
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return the labels [N] of records and the names of the classes."""
    if pattern:
        return _labels_by_pattern(container, [next(iter(files[key].values())) for key in keys], pattern)
    if not any(key in label_files for key in keys):
        return labels_from_folders(keys, container.location, _LABEL_REMEDY)
    labels: list[Label | None] = []
    for key in keys:
        members = {suffix: container.read(name) for suffix, name in label_files.get(key, {}).items()}
        try:
            labels.append(parse_sample_label(members, ""))
        except ValueError as error:
            raise UsageError(unreadable_label_message(f"{container.location}, {printable(key)}", error)) from None
    missing = [key for key, label in zip(keys, labels) if label is None]
    if missing:
        raise missing_labels_error(len(missing), len(keys), f"{container.location}, {printable(missing[0])}")
    numbers, names = number_labels(labels, keys, _NO_LABEL)
    return np.array(numbers, np.int64), names or tuple(map(str, range(max(numbers) + 1)))


def _labels_by_pattern(
    container: FileContainer, names: Sequence[str], pattern: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return labels by the first group of a regular expression in each name."""
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"data.label_pattern={pattern}: {error}. Use one such as ^(\\d+)_") from None
    if not regex.groups:
        raise UsageError(f"data.label_pattern={pattern}: has no group. Put the class in parentheses: ^(\\d+)_")
    found: list[str] = []
    for name in names:
        match = regex.search(name)
        if match is None or not match[1]:
            raise UsageError(
                f"data.label_pattern={pattern}: does not match {container.display_path(name)}. Use a pattern that all "
                "names match, or --data.labels=false"
            )
        found.append(to_nfc(match[1]))
    classes = sort_class_names(set(found))
    number_by_name = {name: number for number, name in enumerate(classes)}
    return np.array([number_by_name[name] for name in found], np.int64), tuple(map(printable, classes))


def _split_name(name: str) -> tuple[str, str]:
    """Return the key of a file, its path up to the first dot of its name, and what follows in lower case."""
    folder, slash, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return f"{folder}{slash}{stem}", suffix.lower() if "." not in suffix else suffix


def _field_of(suffix: str, with_images: bool) -> str | None:
    """Return the field of a file by what follows the first dot of its name; "" if its content says; None for others."""
    field, _, extension = suffix.rpartition(".")
    kind = f".{extension.lower()}"
    if kind == ".npy":
        return field or "x"
    return field if kind in RECORD_FORMATS or (with_images and kind in IMAGE_FORMATS) else None


def _is_part_of_record(name: str) -> bool:
    return _field_of(_split_name(name)[1], with_images=True) is not None


def _twice_error(name: str, first: str, second: str) -> UsageError:
    return UsageError(
        f"data: {first}, {printable(name)} is there twice, also in {second}. Give each record its own name"
    )


def _suffix(name: str) -> str:
    base = name.rsplit("/", 1)[-1]
    return base[base.rindex(".") :].lower() if "." in base.lstrip(".") else ""
