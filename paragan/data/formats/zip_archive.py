"""Image files in a .zip, read one by one without extracting the archive."""

from __future__ import annotations

import contextlib
import itertools
import struct
import zipfile
import zlib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from isal.isal_zlib import crc32

from paragan.core.errors import UsageError
from paragan.data.formats import dataset_json
from paragan.data.formats.class_labels import labels_from_folders, no_label_key_error, sort_by_folder, to_nfc
from paragan.data.formats.dataset_json import (
    CLASSES_JSON,
    DATASET_JSON,
    is_image,
    parse_class_names,
    parse_dataset_json,
)
from paragan.data.formats.image_folder import format_extensions, map_reads
from paragan.data.formats.label_files import ImageFiles, read_label_files
from paragan.data.formats.read_span import max_record_bytes, read_span, too_long_message
from paragan.data.source import IMAGE_FORMATS, DecodeError, LabelChoice, NoImagesError
from paragan.data.storage.filesystem import FileSystem, format_error, is_litter, printable

# The local header of a member: [0] is the signature, [9] and [10] are the lengths of name and extra field.
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_HEADER_SLACK_BYTES = 64  # read beyond the expected header, so that most members take one request instead of two
_ENCRYPTED_FLAG = 1
_UTF8_FLAG = 0x800
_CORRUPTION_ERRORS = (
    *(zipfile.BadZipFile, struct.error, EOFError, RuntimeError, NotImplementedError),
    *(ValueError, LookupError, OverflowError, TypeError),
)


@dataclass(frozen=True, slots=True)
class ZipMember:
    """A file in the archive, as the central directory describes it. Sizes in bytes."""

    name: str
    header_offset: int
    compressed_size: int
    size: int
    method: int
    flags: int
    crc32: int


class ZipArchive:
    """The files in a zip. Names in it are only compared, never used as paths.

    Raises:
        UsageError: it is damaged, or not a zip.
    """

    def __init__(self, fs: FileSystem, name: str):
        self.fs = fs
        self.name = name
        self.location = fs.display_path(name)
        self.size_bytes = fs.size(name)
        with fs.open(name) as file:
            self.members = self._read_directory(file)

    def _read_directory(self, file: BinaryIO) -> list[ZipMember]:
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
                has_backslashes = all("/" not in info.filename for info in infos)
                return [
                    ZipMember(name, i.header_offset, i.compress_size, i.file_size, i.compress_type, i.flag_bits, i.CRC)
                    for i in infos
                    if not (name := _member_name(i, has_backslashes)).endswith("/")
                ]
        except (*_CORRUPTION_ERRORS, OSError) as error:  # OSError: damage made zipfile seek to an impossible position
            reason = format_error(error)
            raise UsageError(f"data: {self.location} is not a zip, or is damaged ({reason}). Write it again") from None

    def read(self, member: ZipMember, max_bytes: int | None = None) -> bytes:
        """Return the contents of a member, verified by its checksum. Raises `DecodeError`."""
        if member.flags & _ENCRYPTED_FLAG:
            raise DecodeError("is encrypted")
        if member.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DecodeError(f"is compressed by method {member.method}, only stored and deflated are supported")
        num_bytes = max(member.size, member.compressed_size)
        if max_bytes is not None and num_bytes > max_bytes:
            raise DecodeError(f"takes {num_bytes:,} bytes, more than any such file ({max_bytes:,})")
        if max_bytes is None and num_bytes > max_record_bytes():
            raise DecodeError(too_long_message(num_bytes))
        data = self._decompress(member, self._read_compressed(member))
        if len(data) != member.size:
            raise DecodeError(f"does not have the {member.size:,} bytes that the archive says")
        if crc32(data) != member.crc32:
            raise DecodeError("does not match its checksum in the archive: it was damaged")
        return data

    def _read_compressed(self, member: ZipMember) -> bytes:
        if not 0 <= member.header_offset <= self.size_bytes - _LOCAL_HEADER.size - member.compressed_size:
            raise DecodeError("lies outside of the archive")
        likely_size = (
            _LOCAL_HEADER.size
            + len(member.name.encode(errors="replace"))
            + _HEADER_SLACK_BYTES
            + member.compressed_size
        )
        likely_size = min(likely_size, self.size_bytes - member.header_offset)
        data = read_span(self.fs, self.name, member.header_offset, likely_size)
        signature, *_, name_size, extra_size = _LOCAL_HEADER.unpack_from(data)
        if signature != b"PK\x03\x04":
            raise DecodeError("has a damaged header in the archive")
        start = _LOCAL_HEADER.size + name_size + extra_size
        if start + member.compressed_size > len(data):
            return read_span(self.fs, self.name, member.header_offset + start, member.compressed_size)
        return data[start : start + member.compressed_size]

    def _decompress(self, member: ZipMember, data: bytes) -> bytes:
        if member.method == zipfile.ZIP_STORED:
            return data
        max_size = member.size + 1  # a wrong size is noticed, and a decompression bomb is harmless
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, max_size)
        except zlib.error as error:
            raise DecodeError(f"cannot be decompressed ({error})") from None


def _member_name(info: zipfile.ZipInfo, has_backslashes: bool) -> str:
    """Return the name of a member. Some programs write backslashes between folders, or ./ before all names.

    has_backslashes: there is no slash in the archive.
    """
    is_windows = info.create_system in (0, 10)  # MS-DOS and NTFS
    name = info.filename
    if not info.flag_bits & _UTF8_FLAG and not name.isascii():
        with contextlib.suppress(UnicodeError):  # macOS writes UTF-8 without the flag
            name = name.encode("cp437").decode("utf8")
    name = to_nfc(name.replace("\\", "/") if is_windows or has_backslashes else name)
    while name.startswith("./"):
        name = name[2:]
    return name


class ZipSource:
    """The images of an archive. Each read is verified with the checksum in the archive.

    Args:
        archive: the archive.
        members: [N] the images.
        labels: [N] int64, or None.
        classes: [K] names.
        notes: lines for `describe`.
    """

    array = None

    def __init__(
        self,
        archive: ZipArchive,
        members: Sequence[ZipMember],
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.archive = archive
        self.members = members
        self.location = archive.location
        self.is_local = not archive.fs.is_remote
        self.labels = labels
        self.classes = classes
        self.notes = notes

    def __len__(self) -> int:
        return len(self.members)

    def read(self, index: int) -> bytes:
        """Return the file of image `index`."""
        return self.archive.read(self.members[index])

    def sample_name(self, index: int) -> str:
        """Return the path or address of the archive, and the name of image `index` in it."""
        return f"{self.location}/{printable(self.members[index].name)}"

    def fingerprint_parts(self) -> Iterable[bytes]:
        """Yield names, sizes and checksums."""
        for member in self.members:
            yield f"{member.name}\0{member.size}\0{member.crc32}\n".encode(errors="surrogateescape")


def open_zip(fs: FileSystem, name: str, *, labels: LabelChoice = True) -> ZipSource:
    """Open the images of the archive `name`, labelled by its dataset.json, or like a folder if it has none.

    Raises:
        UsageError: it is damaged, holds no image, or labels do not fit.
    """
    archive = ZipArchive(fs, name)
    members_by_name = {member.name: member for member in reversed(archive.members)}  # the first of equal names
    images = sorted((member for member in archive.members if is_image(member.name)), key=lambda member: member.name)
    if not images:
        visible = [member.name for member in archive.members if not any(map(is_litter, member.name.split("/")))]
        found = f"only {format_extensions(visible)}" if visible else "only hidden files and those of desktops"
        if not archive.members:
            found = "it is empty"
        raise NoImagesError(f"data: {archive.location} holds no image, {found}: put {', '.join(IMAGE_FORMATS)} into it")
    names = [member.name for member in images]
    for first, second in itertools.pairwise(names):
        if first == second:
            raise UsageError(
                f"data: {archive.location} holds {printable(first)} twice. Write it again with one of them"
            )
    root = _root_of(names, members_by_name)
    if root + DATASET_JSON not in members_by_name:
        return _open_like_folder(archive, members_by_name, sort_by_folder(names), labels)
    path = f"{archive.location}/{root}{DATASET_JSON}"
    if isinstance(labels, str):
        raise no_label_key_error(labels, path)
    classes_member = members_by_name.get(root + CLASSES_JSON)
    notes = _describe_ignored(len(archive.members) - len(images) - 1 - bool(classes_member))
    if not labels:
        return ZipSource(archive, images, None, (), notes)
    classes: tuple[str, ...] = ()
    if classes_member:
        data = _read_label_file(archive, classes_member)
        classes = parse_class_names(data, f"{archive.location}/{root}{CLASSES_JSON}")
    data = _read_label_file(archive, members_by_name[root + DATASET_JSON])
    numbers, classes = parse_dataset_json(data, [name.removeprefix(root) for name in names], path, classes)
    return ZipSource(archive, images, numbers, classes, notes)


def _open_like_folder(
    archive: ZipArchive, members_by_name: dict[str, ZipMember], names: Sequence[str], labels: LabelChoice
) -> ZipSource:
    """Open the images `names` [N], labelled by files beside them or by their folders."""
    images = [members_by_name[name] for name in names]
    others = [name for name in members_by_name.keys() - set(names) if not any(map(is_litter, name.split("/")))]
    num_others = len(archive.members) - len(images)
    if not labels:
        return ZipSource(archive, images, None, (), _describe_ignored(num_others))

    def read(selected: Sequence[str]) -> list[bytes]:
        members = [members_by_name[name] for name in selected]
        return map_reads(lambda member: _read_label_file(archive, member), members, archive.fs.is_remote)

    numbers, classes = labels_from_folders(names, archive.location, f"add a {DATASET_JSON}")
    outer = _outer_folder(names, has_classes=numbers is not None)
    files = ImageFiles(archive.location, names, sorted(others), read, numbers is not None, outer, is_archive=True)
    file_labels = read_label_files(files, labels)
    if file_labels is None:
        return ZipSource(archive, images, numbers, classes, _describe_ignored(num_others))
    notes = (file_labels.note, *_describe_ignored(num_others - len(file_labels.files)))
    return ZipSource(archive, images, file_labels.labels, file_labels.classes, notes)


def _read_label_file(archive: ZipArchive, member: ZipMember) -> bytes:
    try:
        return archive.read(member, dataset_json.MAX_JSON_BYTES)
    except DecodeError as error:
        raise UsageError(
            f"data: {archive.location}/{printable(member.name)} cannot be read: it {error}. Write the archive again, "
            "or use --data.labels=false"
        ) from None


def _describe_ignored(count: int) -> tuple[str, ...]:
    return (f"ignored other files in the archive ({count:,})",) if count else ()


def _outer_folder(names: Sequence[str], has_classes: bool) -> str:
    """Return the folder around all images or class folders, with a slash; "" if it is the top."""
    folder = names[0].rpartition("/")[0]
    if has_classes:
        folder = folder.rpartition("/")[0]
    return f"{folder}/" if folder else ""


def _root_of(names: Sequence[str], members: Container[str]) -> str:
    """Return the folder around all images that has the dataset.json, with a slash; "" if it is the top."""
    root = ""
    while root + DATASET_JSON not in members:
        folder = names[0].removeprefix(root).partition("/")[0] + "/"
        if not all(name.startswith(root + folder) for name in names):
            return ""
        root += folder
    return root
