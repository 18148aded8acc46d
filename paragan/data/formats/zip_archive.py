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

from paragan.core.errors import Unusable
from paragan.data.formats import dataset_json
from paragan.data.formats.dataset_json import CLASSES, LISTING, class_names, is_image, listed, named
from paragan.data.formats.image_folder import extensions
from paragan.data.formats.read_span import LARGEST, fetch
from paragan.data.source import FORMATS, DecodeError
from paragan.data.storage.filesystem import Place, one_line, shown

_LOCAL = struct.Struct("<4s5H3L2H")  # the header before a member's bytes: [0] signature, [9] and [10] two lengths
_SLACK = 64  # bytes asked for beyond what the header probably takes: one request a member instead of two
_ENCRYPTED = 1
_DAMAGE = (
    *(zipfile.BadZipFile, struct.error, EOFError, RuntimeError, NotImplementedError),
    *(ValueError, LookupError, OverflowError, TypeError),
)


@dataclass(frozen=True, slots=True)
class Member:
    """Where a file lies in its archive, as the central directory says. Sizes in bytes."""

    name: str
    at: int  # of its local header
    packed: int
    size: int
    method: int
    flags: int
    crc32: int


class Archive:
    """The files in a zip. Names in it are only ever compared, never taken for paths."""

    def __init__(self, place: Place, name: str):
        self.place, self.name, self.where = place, name, place.at(name)
        self.bytes = place.size(name)
        with place.open(name) as file:
            self.members = self._members(file)

    def _members(self, file: BinaryIO) -> list[Member]:
        try:
            with zipfile.ZipFile(file) as archive:
                return [
                    Member(
                        i.filename, i.header_offset, i.compress_size, i.file_size, i.compress_type, i.flag_bits, i.CRC
                    )
                    for i in archive.infolist()
                    if not i.filename.endswith("/")
                ]
        except (*_DAMAGE, OSError) as error:  # OSError: the damage sent zipfile to an impossible place
            reason = one_line(error)
            raise Unusable(f"data: {self.where} is no zip, or a damaged one ({reason}): write it again") from None

    def read(self, member: Member, most: int = LARGEST) -> bytes:
        """What a member holds, checked. Raises `DecodeError`."""
        if member.flags & _ENCRYPTED:
            raise DecodeError("is encrypted")
        if member.method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DecodeError(f"is packed by method {member.method}, only stored and deflated are read")
        if max(member.size, member.packed) > most:
            raise DecodeError(f"takes {max(member.size, member.packed):,} bytes, more than any image ({most:,})")
        data = self._unpacked(member, self._packed(member))
        if len(data) != member.size:
            raise DecodeError(f"is not of {member.size:,} bytes, as the archive says")
        if crc32(data) != member.crc32:
            raise DecodeError("its checksum in the archive is another: it was damaged")
        return data

    def _packed(self, member: Member) -> bytes:
        likely = _LOCAL.size + len(member.name.encode(errors="replace")) + _SLACK + member.packed
        if not 0 <= member.at <= self.bytes - _LOCAL.size - member.packed:
            raise DecodeError("lies outside of the archive")
        data = fetch(self.place, self.name, member.at, min(likely, self.bytes - member.at))
        signature, *_, name, extra = _LOCAL.unpack_from(data)
        if signature != b"PK\x03\x04":
            raise DecodeError("its header in the archive is damaged")
        start = _LOCAL.size + name + extra
        if start + member.packed > len(data):
            return fetch(self.place, self.name, member.at + start, member.packed)
        return data[start : start + member.packed]

    def _unpacked(self, member: Member, data: bytes) -> bytes:
        if member.method == zipfile.ZIP_STORED:
            return data
        try:
            return zlib.decompressobj(-zlib.MAX_WBITS).decompress(
                data, member.size + 1
            )  # never more, whatever it holds
        except zlib.error as error:
            raise DecodeError(f"cannot be unpacked ({error})") from None


class Zipped:
    """The images in an archive. Their checksums are those of the archive, and checked."""

    whole = None

    def __init__(
        self,
        archive: Archive,
        members: Sequence[Member],
        labels: np.ndarray | None,
        classes: tuple[str, ...],
        notes: tuple[str, ...],
    ):
        self.archive, self.members, self.where, self.near = archive, members, archive.where, not archive.place.remote
        self.labels, self.classes, self.notes = labels, classes, notes

    def __len__(self) -> int:
        return len(self.members)

    def read(self, index: int) -> bytes:
        return self.archive.read(self.members[index])

    def name(self, index: int) -> str:
        return f"{self.where}/{shown(self.members[index].name)}"

    def identity(self) -> Iterable[bytes]:
        for one in self.members:
            yield f"{one.name}\0{one.size}\0{one.crc32}\n".encode(errors="surrogateescape")


def zipped(place: Place, name: str, *, labels: bool = True) -> Zipped:
    """The images in the archive `name`, labelled by its dataset.json, or by its folders where it has none."""
    archive = Archive(place, name)
    images = sorted((one for one in archive.members if is_image(one.name)), key=lambda one: one.name)
    if not images:
        found = f"only {extensions(one.name for one in archive.members)}" if archive.members else "it is empty"
        raise Unusable(f"data: {archive.where} holds no image, {found}: put {', '.join(FORMATS)} into it")
    names = [one.name for one in images]
    others = len(archive.members) - len(images)
    twice = next((name for name, after in itertools.pairwise(names) if name == after), None)
    if twice is not None:
        raise Unusable(f"data: {archive.where} holds {shown(twice)} twice: write it again with one of them")
    about, names_of = (next((one for one in archive.members if one.name == name), None) for name in (LISTING, CLASSES))
    others -= bool(about) + bool(about and names_of)
    notes = (f"ignored other files in the archive ({others:,})",) * bool(others)
    if not labels:
        return Zipped(archive, images, None, (), notes)
    if about is None:
        return Zipped(archive, images, *_by_folder(names, archive.where), notes)
    where = f"{archive.where}/{LISTING}"
    try:
        classes = class_names(archive.read(names_of), f"{archive.where}/{CLASSES}") if names_of else ()
        numbers = listed(archive.read(about, dataset_json.LARGEST), names, where, len(classes) or None)
    except DecodeError as error:
        raise Unusable(f"data: {where} cannot be read: it {error}; write the archive again") from None
    return Zipped(archive, images, numbers, named(numbers, classes), notes)


def _by_folder(names: Sequence[str], where: str) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Labels by the folder that holds a file; without any folder, none. One folder around all of them is nothing."""
    parts = [name.split("/")[:-1] for name in names]
    depth = len(parts[0])
    odd = next((name for name, folders in zip(names, parts) if len(folders) != depth), None)
    if odd is not None:
        raise Unusable(
            f"data: {where} holds images at different depths ({shown(names[0])}, {shown(odd)}): "
            f"put all of them into a folder each class, or add a {LISTING}"
        )
    if depth > 1 and len({tuple(folders[:-1]) for folders in parts}) > 1:
        raise Unusable(
            f"data: {where} holds folders within folders ({shown(names[0])}): "
            f"keep one level, a folder each class, or add a {LISTING}"
        )
    if depth == 0:
        return None, ()
    classes, labels = np.unique([folders[-1] for folders in parts], return_inverse=True)
    return labels.astype(np.int64), tuple(shown(str(name)) for name in classes)
