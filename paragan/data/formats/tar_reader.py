"""Find the files in a tar by reading it once from front to end."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from paragan.core.errors import UsageError
from paragan.data.storage.filesystem import FileSystem

BLOCK_BYTES = 512
READ_CHUNK_BYTES = 2**22
_MAX_HEADER_BYTES = 2**20  # of a long name, or of extended attributes

_ZERO_BLOCK = bytes(BLOCK_BYTES)
_REGULAR_TYPES = b"0\x007"
_LINK_TYPES = b"12"
_NO_DATA_TYPES = b"3456"  # devices, folders, pipes: headers without data
_PAX_LENGTH = re.compile(rb"(\d{1,7}) ")


@dataclass(frozen=True)
class TarMember:
    """A regular file in a tar: offset and size of its data, in bytes."""

    name: str
    offset: int
    size: int


class SequentialReader:
    """Reads a file forwards in large chunks.

    Args:
        fs: its folder.
        name: its name.
        size: in bytes.
    """

    def __init__(self, fs: FileSystem, name: str, size: int):
        self.fs = fs
        self.name = name
        self.size = size
        self._chunk = b""
        self._chunk_offset = 0

    def read(self, offset: int, size: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer at the end of the file."""
        size = max(0, min(size, self.size - offset))
        if not self._chunk_offset <= offset <= offset + size <= self._chunk_offset + len(self._chunk):
            self._chunk_offset = offset
            chunk_size = min(max(size, READ_CHUNK_BYTES), self.size - offset)
            self._chunk = self.fs.read(self.name, offset, chunk_size) if size else b""
        return self._chunk[offset - self._chunk_offset : offset - self._chunk_offset + size]

    def iter_chunks(self, offset: int, size: int) -> Iterator[bytes]:
        """Yield the same bytes in chunks, for data that may be large."""
        for start in range(offset, offset + size, READ_CHUNK_BYTES):
            yield self.read(start, min(READ_CHUNK_BYTES, offset + size - start))


def iter_members(file: SequentialReader) -> Iterator[TarMember]:
    """Yield the regular files of a tar, in order. Links, folders and devices are skipped.

    Raises:
        UsageError: the tar is damaged, truncated, or has an unsupported member.
    """
    offset = 0
    name: str | None = None  # of the next file, from an extended header
    size: int | None = None  # of the next file, from an extended header
    while True:
        header = file.read(offset, BLOCK_BYTES)
        if len(header) < BLOCK_BYTES:
            raise _corrupt_error(
                file, offset, "the file ends without the empty block that ends a tar: it was truncated"
            )
        if header == _ZERO_BLOCK:
            return
        member_type = header[156:157]
        length = _parse_number(header[124:136])
        if length is None or not _is_checksum(_parse_number(header[148:156]), header):
            raise _corrupt_error(file, offset, "there is no header of a tar")
        data_offset = offset + BLOCK_BYTES
        if member_type in _REGULAR_TYPES and size is not None:
            length = size
        if member_type in _LINK_TYPES or member_type in _NO_DATA_TYPES:
            length = 0
        if length > file.size - data_offset:
            raise _corrupt_error(file, offset, f"a member of {length:,} bytes is not complete: the file was truncated")
        if member_type in b"LKxXg":
            if length > _MAX_HEADER_BYTES:
                raise _corrupt_error(file, offset, f"an extended header takes {length:,} bytes")
            data = file.read(data_offset, length)
            name, size = _parse_extended_header(file, offset, member_type, data, name, size)
        else:
            if member_type == b"S":
                raise _sparse_error(file, offset)
            if member_type in _REGULAR_TYPES:
                yield TarMember(_member_name(header) if name is None else name, data_offset, length)
            name = None
            size = None
        offset = data_offset + -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _parse_extended_header(
    file: SequentialReader, offset: int, member_type: bytes, data: bytes, name: str | None, size: int | None
) -> tuple[str | None, int | None]:
    """Return the name and size of the next file, with what an extended header says about them."""
    if member_type == b"L":
        return _decode_text(data), size
    if member_type in b"xX":
        attributes = _parse_pax(file, offset, data)
        if any(key.startswith(b"GNU.sparse.") for key in attributes):
            raise _sparse_error(file, offset)
        if b"path" in attributes:
            name = _decode_text(attributes[b"path"])
        if b"size" in attributes:
            if not re.fullmatch(rb"\d{1,18}", attributes[b"size"]):
                raise _corrupt_error(file, offset, "an extended header holds a size that is not a number")
            size = int(attributes[b"size"])
    return name, size


def _parse_pax(file: SequentialReader, offset: int, data: bytes) -> dict[bytes, bytes]:
    """Parse records of "length key=value\\n"."""
    attributes: dict[bytes, bytes] = {}
    start = 0
    while start < len(data) and data[start]:
        match = _PAX_LENGTH.match(data, start)
        end = start + int(match[1]) if match else 0
        record = data[match.end() if match else start : end]
        if not match or end > len(data) or not record.endswith(b"\n") or b"=" not in record:
            raise _corrupt_error(file, offset, "an extended header is damaged")
        key, _, value = record[:-1].partition(b"=")
        attributes[key] = value
        start = end
    return attributes


def _parse_number(field: bytes) -> int | None:
    """Parse octal text, or base 256 after a first byte of 0x80; None if it is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0")[0].strip()
    return int(text or b"0", 8) if re.fullmatch(rb"[0-7]*", text) else None


def _is_checksum(value: int | None, header: bytes) -> bool:
    """Return whether `value` is the checksum of a header: of unsigned bytes (the standard), or of signed bytes (old
    writers)."""
    others = header[:148] + b" " * 8 + header[156:]
    return value is not None and (value == sum(others) or value == sum(struct.unpack("512b", others)))


def _member_name(header: bytes) -> str:
    name = _decode_text(header[:100])
    prefix = _decode_text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _decode_text(data: bytes) -> str:
    return data.split(b"\0")[0].decode("utf8", "surrogateescape")


def _corrupt_error(file: SequentialReader, offset: int, problem: str) -> UsageError:
    return UsageError(f"data: {file.fs.display_path(file.name)}: at byte {offset:,} {problem}. Write this shard again")


def _sparse_error(file: SequentialReader, offset: int) -> UsageError:
    return _corrupt_error(file, offset, "a sparse file begins, which is not supported: pack it without --sparse")
