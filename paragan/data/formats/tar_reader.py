"""The files in a tar: where each lies, found by reading it once from front to end."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from paragan.core.errors import UsageError
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import FileSystem

BLOCK_BYTES = 512
READ_CHUNK_BYTES = 2**22  # bytes read at once
_MAX_HEADER_BYTES = 2**20  # bytes of a long name, or of extended attributes

_ZERO_BLOCK = bytes(BLOCK_BYTES)
_REGULAR_TYPES, _LINK_TYPES = b"0\x007", b"12"
_NO_DATA_TYPES = b"3456"  # devices, folders, pipes: headers without data
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")


@dataclass(frozen=True)
class TarMember:
    """A regular file in a tar: `at` and `size` of its data, in bytes."""

    name: str
    offset: int
    size: int


class SequentialReader:
    """A file read forwards in large pieces."""

    def __init__(self, fs: FileSystem, name: str, size: int):
        self.fs, self.name, self.size = fs, name, size
        self.start, self.data = 0, b""

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes from `at` on, fewer at the end of the file."""
        size = max(0, min(size, self.size - offset))
        if not self.start <= offset <= offset + size <= self.start + len(self.data):
            self.start = offset
            self.data = (
                self.fs.read(self.name, offset, min(max(size, READ_CHUNK_BYTES), self.size - offset)) if size else b""
            )
        return self.data[offset - self.start : offset - self.start + size]

    def iter_chunks(self, offset: int, size: int) -> Iterator[bytes]:
        """The same in pieces, for what may be large."""
        for start in range(offset, offset + size, READ_CHUNK_BYTES):
            yield self.read(start, min(READ_CHUNK_BYTES, offset + size - start))


def iter_members(file: SequentialReader) -> Iterator[TarMember]:
    """The regular files of a tar, in order. Links, folders and devices are passed over.

    Raises `Unusable` for what is damaged, cut short, or uses a form that is not known here.
    """
    at, name, size = 0, None, None  # what an extended header said about the next file
    while True:
        header = file.read(at, BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            raise _corrupt_error(file, at, "ends here, without the empty block that ends a tar: it was cut")
        if header == _ZERO_BLOCK:
            return
        kind, length = header[156:157], _parse_number(header[124:136])
        if length is None or not _is_checksum(_parse_number(header[148:156]), header):
            raise _corrupt_error(file, at, "there is no header of a tar")
        data = at + BLOCK_BYTES
        if kind in _REGULAR_TYPES and size is not None:
            length = size
        if kind in _LINK_TYPES or kind in _NO_DATA_TYPES:
            length = 0
        if length > file.size - data:
            raise _corrupt_error(file, at, f"a member of {length:,} bytes begins, but the file ends before: it was cut")
        if kind in b"LKxXg":
            if length > _MAX_HEADER_BYTES:
                raise _corrupt_error(file, at, f"an extended header takes {length:,} bytes")
            name, size = _parse_extended_header(file, at, kind, file.read(data, length), name, size)
        else:
            if kind == b"S":
                raise _corrupt_error(file, at, "a sparse file begins, which is not read: pack it without --sparse")
            if kind in _REGULAR_TYPES:
                yield TarMember(_member_name(header) if name is None else name, data, length)
            name, size = None, None
        at = data + -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _parse_extended_header(
    file: SequentialReader, offset: int, kind: bytes, data: bytes, name: str | None, size: int | None
) -> tuple[str | None, int | None]:
    if kind == b"L":
        return _decode_text(data), size
    if kind in b"xX":
        said = _parse_pax(file, offset, data)
        if any(key.startswith(b"GNU.sparse.") for key in said):
            raise _corrupt_error(file, offset, "a sparse file begins, which is not read: pack it without --sparse")
        if b"path" in said:
            name = _decode_text(said[b"path"])
        if b"size" in said:
            if not re.fullmatch(rb"\d{1,18}", said[b"size"]):
                raise _corrupt_error(file, offset, "an extended header holds a size that is no number")
            size = int(said[b"size"])
    return name, size


def _parse_pax(file: SequentialReader, offset: int, data: bytes) -> dict[bytes, bytes]:
    """Records of "length key=value\\n"."""
    found, start = {}, 0
    while start < len(data) and data[start]:
        match = _PAX_LENGTH.match(data, start)
        end = start + int(match[1]) if match else 0
        record = data[match.end() if match else start : end]
        if not match or end > len(data) or not record.endswith(b"\n") or b"=" not in record:
            raise _corrupt_error(file, offset, "an extended header is damaged")
        key, _, value = record[:-1].partition(b"=")
        found[key], start = value, end
    return found


def _parse_number(field: bytes) -> int | None:
    """Octal text, or base 256 behind a first byte of 0x80; None for what is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0")[0].strip()
    return int(text or b"0", 8) if re.fullmatch(rb"[0-7]*", text) else None


def _is_checksum(value: int | None, header: bytes) -> bool:
    """Whether it is the header's checksum: of bytes, as the standard has it, or of signed ones, as old writers had."""
    others = header[:148] + b" " * 8 + header[156:]
    return value is not None and (value == sum(others) or value == sum(struct.unpack("512b", others)))


def _member_name(header: bytes) -> str:
    name, prefix = _decode_text(header[:100]), _decode_text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _decode_text(data: bytes) -> str:
    return data.split(b"\0")[0].decode("utf8", "surrogateescape")


def _corrupt_error(file: SequentialReader, offset: int, what: str) -> UsageError:
    return UsageError(f"data: {file.fs.display_path(file.name)}: at byte {offset:,} {what}; write this shard again")


def changed_shard_error(file: SequentialReader, error: DecodeError) -> UsageError:
    """For a shard that changed while it was read."""
    return UsageError(f"data: {file.fs.display_path(file.name)} cannot be read: it {error}; is it being written?")
