"""Image files in a .zip, read one by one where they lie in it."""

from __future__ import annotations

import itertools
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from isal.isal_zlib import crc32

from paragan.core.errors import UsageError
from paragan.data.formats import dataset_json
from paragan.data.formats.dataset_json import (
    CLASSES_JSON,
    DATASET_JSON,
    is_image,
    parse_class_names,
    parse_dataset_json,
    resolve_class_names,
)
from paragan.data.formats.image_folder import format_extensions
from paragan.data.formats.read_span import MAX_RECORD_BYTES, read_span
from paragan.data.source import IMAGE_FORMATS, DecodeError
from paragan.data.storage.filesystem import FileSystem, format_error, printable

_LOCAL_HEADER = struct.Struct(
    "<4s5H3L2H"
)  # the header before a member's bytes: [0] signature, [9] and [10] two lengths
_HEADER_SLACK_BYTES = 64  # bytes asked for beyond what the header probably takes: one request a member instead of two
_ENCRYPTED_FLAG = 1
_CORRUPTION_ERRORS = (
    *(zipfile.BadZipFile, struct.error, EOFError, RuntimeError, NotImplementedError),
    *(ValueError, LookupError, OverflowError, TypeError),
)


@dataclass(frozen=True, slots=True)
class ZipMember:
    """Where a file lies in its archive, as the central directory says. Sizes in bytes."""

    name: str
    header_offset: int  # of its local header
    compressed_size: int
    size: int
    method: int
    flags: int
    crc32: int


class ZipArchive:
    """The files in a zip. Names in it are only ever compared, never taken for paths."""

    def __init__(self, fs: FileSystem, name: str):
        self.fs, self.name, self.location = fs, name, fs.display_path(name)
        self.size_bytes = fs.size(name)
        with fs.open(name) as file:
            self.members = self._read_directory(file)

    def _read_directory(self, file: BinaryIO) -> list[ZipMember]:
        try:
            with zipfile.ZipFile(file) as archive:
                return [
                    ZipMember(
                        i.filename, i.header_offset, i.compress_size, i.file_size, i.compress_type, i.flag_bits, i.CRC
                    )
                    for i in archive.infolist()
                    if not i.filename.endswith("/")
                ]
        except (*_CORRUPTION_ERRORS, OSError) as error:  # OSError: the damage sent zipfile to an impossible place
            reason = format_error(error)
            raise UsageError(f"data: {self.location} is no zip, or a damaged one ({reason}): write it again") from None

    def read(self, member: ZipMember, max_bytes: int = MAX_RECORD_BYTES) -> bytes:
        """What a member holds, checked. Raises `DecodeError`."""
        if member.flags & _ENCRYPTED_FLAG:
            raise DecodeError("is encrypted")
        if member.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DecodeError(f"is packed by method {member.method}, only stored and deflated are read")
        if max(member.size, member.compressed_size) > max_bytes:
            raise DecodeError(
                f"takes {max(member.size, member.compressed_size):,} bytes, more than any image ({max_bytes:,})"
            )
        data = self._decompress(member, self._read_compressed(member))
        if len(data) != member.size:
            raise DecodeError(f"is not of {member.size:,} bytes, as the archive says")
        if crc32(data) != member.crc32:
            raise DecodeError("its checksum in the archive is another: it was damaged")
        return data

    def _read_compressed(self, member: ZipMember) -> bytes:
        likely = (
            _LOCAL_HEADER.size
            + len(member.name.encode(errors="replace"))
            + _HEADER_SLACK_BYTES
            + member.compressed_size
        )
        if not 0 <= member.header_offset <= self.size_bytes - _LOCAL_HEADER.size - member.compressed_size:
            raise DecodeError("lies outside of the archive")
        data = read_span(self.fs, self.name, member.header_offset, min(likely, self.size_bytes - member.header_offset))
        signature, *_, name, extra = _LOCAL_HEADER.unpack_from(data)
        if signature != b"PK\x03\x04":
            raise DecodeError("its header in the archive is damaged")
        start = _LOCAL_HEADER.size + name + extra
        if start + member.compressed_size > len(data):
            return read_span(self.fs, self.name, member.header_offset + start, member.compressed_size)
        return data[start : start + member.compressed_size]

    def _decompress(self, member: ZipMember, data: bytes) -> bytes:
        if member.method == zipfile.ZIP_STORED:
            return data
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(
                data, member.size + 1
            )  # never more, whatever it holds
        except zlib.error as error:
            raise DecodeError(f"cannot be unpacked ({error})") from None


class ZipSource:
    """The images in an archive. Their checksums are those of the archive, and checked."""

    array = None

    def __init__(
        self,
        archive: ZipArchive,
        members: Sequence[ZipMember],
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.archive, self.members, self.location, self.is_local = (
            archive,
            members,
            archive.location,
            not archive.fs.is_remote,
        )
        self.labels, self.classes, self.notes = labels, classes, notes

    def __len__(self) -> int:
        return len(self.members)

    def read(self, index: int) -> bytes:
        return self.archive.read(self.members[index])

    def sample_name(self, index: int) -> str:
        return f"{self.location}/{printable(self.members[index].name)}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        for one in self.members:
            yield f"{one.name}\0{one.size}\0{one.crc32}\n".encode(errors="surrogateescape")


def open_zip(fs: FileSystem, name: str, *, labels: bool = True) -> ZipSource:
    """The images in the archive `name`, labelled by its dataset.json, or by its folders where it has none."""
    archive = ZipArchive(fs, name)
    images = sorted((one for one in archive.members if is_image(one.name)), key=lambda one: one.name)
    if not images:
        found = f"only {format_extensions(one.name for one in archive.members)}" if archive.members else "it is empty"
        raise UsageError(f"data: {archive.location} holds no image, {found}: put {', '.join(IMAGE_FORMATS)} into it")
    names = [one.name for one in images]
    others = len(archive.members) - len(images)
    twice = next((name for name, after in itertools.pairwise(names) if name == after), None)
    if twice is not None:
        raise UsageError(f"data: {archive.location} holds {printable(twice)} twice: write it again with one of them")
    about, names_of = (
        next((one for one in archive.members if one.name == name), None) for name in (DATASET_JSON, CLASSES_JSON)
    )
    others -= bool(about) + bool(about and names_of)
    notes = (f"ignored other files in the archive ({others:,})",) * bool(others)
    if not labels:
        return ZipSource(archive, images, None, (), notes)
    if about is None:
        return ZipSource(archive, images, *_labels_from_folders(names, archive.location), notes)
    where = f"{archive.location}/{DATASET_JSON}"
    try:
        classes = parse_class_names(archive.read(names_of), f"{archive.location}/{CLASSES_JSON}") if names_of else ()
        numbers = parse_dataset_json(
            archive.read(about, dataset_json.MAX_JSON_BYTES), names, where, len(classes) or None
        )
    except DecodeError as error:
        raise UsageError(f"data: {where} cannot be read: it {error}; write the archive again") from None
    return ZipSource(archive, images, numbers, resolve_class_names(numbers, classes), notes)


def _labels_from_folders(names: Sequence[str], location: str) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Labels by the folder that holds a file; without any folder, none. One folder around all of them is nothing."""
    parts = [name.split("/")[:-1] for name in names]
    depth = len(parts[0])
    odd = next((name for name, folders in zip(names, parts) if len(folders) != depth), None)
    if odd is not None:
        raise UsageError(
            f"data: {location} holds images at different depths ({printable(names[0])}, {printable(odd)}): "
            f"put all of them into a folder each class, or add a {DATASET_JSON}"
        )
    if depth > 1 and len({tuple(folders[:-1]) for folders in parts}) > 1:
        raise UsageError(
            f"data: {location} holds folders within folders ({printable(names[0])}): "
            f"keep one level, a folder each class, or add a {DATASET_JSON}"
        )
    if depth == 0:
        return None, ()
    classes, labels = np.unique([folders[-1] for folders in parts], return_inverse=True)
    return labels.astype(np.int64), tuple(printable(str(name)) for name in classes)
