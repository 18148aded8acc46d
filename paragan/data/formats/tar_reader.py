"""Find the files in a tar by reading it once from front to end."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from paragan.core.errors import UsageError
from paragan.data.storage.filesystem import FileSystem

BLOCK_BYTES = 512
READ_CHUNK_BYTES = 2**22
_MAX_HEADER_BYTES = 2**20  # of a long name, or of extended attributes

_ZERO_BLOCK = bytes(BLOCK_BYTES)
_NO_DATA_TYPES = b"123456"  # links, devices, folders, pipes: headers without data
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

    The standard library parses headers, but not extended ones: it reads them whatever their size, takes a size that is
    no number for 0, and may stop at a damaged record without an error.

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
        info = _parse_header(file, offset, header)
        length = info.size
        data_offset = offset + BLOCK_BYTES
        if info.isreg() and size is not None:
            length = size
        if info.type in _NO_DATA_TYPES:
            length = 0
        if length > file.size - data_offset:
            raise _corrupt_error(file, offset, f"a member of {length:,} bytes is not complete: the file was truncated")
        if info.type in b"LKxXg":
            if length > _MAX_HEADER_BYTES:
                raise _corrupt_error(file, offset, f"an extended header takes {length:,} bytes")
            data = file.read(data_offset, length)
            name, size = _parse_extended_header(file, offset, info.type, data, name, size)
        else:
            if info.type == tarfile.GNUTYPE_SPARSE:
                raise _sparse_error(file, offset)
            if info.isreg():
                yield TarMember(_member_name(info, header) if name is None else name, data_offset, length)
            name = None
            size = None
        offset = data_offset + -(-length // BLOCK_BYTES) * BLOCK_BYTES


def _parse_header(file: SequentialReader, offset: int, header: bytes) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(header, "utf8", "surrogateescape")
    except tarfile.HeaderError:
        raise _corrupt_error(file, offset, "there is no header of a tar") from None
    if info.size < 0:  # a number to base 256 has a sign
        raise _corrupt_error(file, offset, "there is no header of a tar")
    return info


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


def _member_name(info: tarfile.TarInfo, header: bytes) -> str:
    """Return the name in a header. Where it is not of POSIX, other fields stand in the place of the prefix."""
    return info.name if header[257:263] == b"ustar\0" else _decode_text(header[:100])


def _decode_text(data: bytes) -> str:
    return data.split(b"\0")[0].decode("utf8", "surrogateescape")


def _corrupt_error(file: SequentialReader, offset: int, problem: str) -> UsageError:
    return UsageError(f"data: {file.fs.display_path(file.name)}: at byte {offset:,} {problem}. Write this shard again")


def _sparse_error(file: SequentialReader, offset: int) -> UsageError:
    return _corrupt_error(file, offset, "a sparse file begins, which is not supported: pack it without --sparse")
