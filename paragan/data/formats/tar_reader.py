"""The files in a tar: where each lies, found by reading it once from front to end."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from paragan.core.errors import Unusable
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import Place

BLOCK = 512
WINDOW = 2**22  # bytes read at once
_LONGEST = 2**20  # bytes of a long name, or of extended attributes

_EMPTY = bytes(BLOCK)
_REGULAR, _LINKS = b"0\x007", b"12"
_BARE = b"3456"  # devices, folders, pipes: headers without data
_PAX = re.compile(rb"(\d{1,7}) ")


@dataclass(frozen=True)
class Member:
    """A regular file in a tar: `at` and `size` of its data, in bytes."""

    name: str
    at: int
    size: int


class Windowed:
    """A file read forwards in large pieces."""

    def __init__(self, place: Place, name: str, size: int):
        self.place, self.name, self.size = place, name, size
        self.start, self.data = 0, b""

    def read(self, at: int, size: int) -> bytes:
        """`size` bytes from `at` on, fewer at the end of the file."""
        size = max(0, min(size, self.size - at))
        if not self.start <= at <= at + size <= self.start + len(self.data):
            self.start = at
            self.data = self.place.read(self.name, at, min(max(size, WINDOW), self.size - at)) if size else b""
        return self.data[at - self.start : at - self.start + size]

    def pieces(self, at: int, size: int) -> Iterator[bytes]:
        """The same in pieces, for what may be large."""
        for start in range(at, at + size, WINDOW):
            yield self.read(start, min(WINDOW, at + size - start))


def members(file: Windowed) -> Iterator[Member]:
    """The regular files of a tar, in order. Links, folders and devices are passed over.

    Raises `Unusable` for what is damaged, cut short, or uses a form that is not known here.
    """
    at, name, size = 0, None, None  # what an extended header said about the next file
    while True:
        header = file.read(at, BLOCK)
        if len(header) < BLOCK:
            raise _damaged(file, at, "ends here, without the empty block that ends a tar: it was cut")
        if header == _EMPTY:
            return
        kind, length = header[156:157], _number(header[124:136])
        if length is None or not _is_sum(_number(header[148:156]), header):
            raise _damaged(file, at, "there is no header of a tar")
        data = at + BLOCK
        if kind in _REGULAR and size is not None:
            length = size
        if kind in _LINKS or kind in _BARE:
            length = 0
        if length > file.size - data:
            raise _damaged(file, at, f"a member of {length:,} bytes begins, but the file ends before: it was cut")
        if kind in b"LKxXg":
            if length > _LONGEST:
                raise _damaged(file, at, f"an extended header takes {length:,} bytes")
            name, size = _extended(file, at, kind, file.read(data, length), name, size)
        else:
            if kind == b"S":
                raise _damaged(file, at, "a sparse file begins, which is not read: pack it without --sparse")
            if kind in _REGULAR:
                yield Member(_name(header) if name is None else name, data, length)
            name, size = None, None
        at = data + -(-length // BLOCK) * BLOCK


def _extended(
    file: Windowed, at: int, kind: bytes, data: bytes, name: str | None, size: int | None
) -> tuple[str | None, int | None]:
    if kind == b"L":
        return _text(data), size
    if kind in b"xX":
        said = _attributes(file, at, data)
        if any(key.startswith(b"GNU.sparse.") for key in said):
            raise _damaged(file, at, "a sparse file begins, which is not read: pack it without --sparse")
        if b"path" in said:
            name = _text(said[b"path"])
        if b"size" in said:
            if not re.fullmatch(rb"\d{1,18}", said[b"size"]):
                raise _damaged(file, at, "an extended header holds a size that is no number")
            size = int(said[b"size"])
    return name, size


def _attributes(file: Windowed, at: int, data: bytes) -> dict[bytes, bytes]:
    """Records of "length key=value\\n"."""
    found, start = {}, 0
    while start < len(data) and data[start]:
        match = _PAX.match(data, start)
        end = start + int(match[1]) if match else 0
        record = data[match.end() if match else start : end]
        if not match or end > len(data) or not record.endswith(b"\n") or b"=" not in record:
            raise _damaged(file, at, "an extended header is damaged")
        key, _, value = record[:-1].partition(b"=")
        found[key], start = value, end
    return found


def _number(field: bytes) -> int | None:
    """Octal text, or base 256 behind a first byte of 0x80; None for what is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    text = field.split(b"\0")[0].strip()
    return int(text or b"0", 8) if re.fullmatch(rb"[0-7]*", text) else None


def _is_sum(said: int | None, header: bytes) -> bool:
    """Whether it is the header's checksum: of bytes, as the standard has it, or of signed ones, as old writers had."""
    others = header[:148] + b" " * 8 + header[156:]
    return said is not None and (said == sum(others) or said == sum(struct.unpack("512b", others)))


def _name(header: bytes) -> str:
    name, prefix = _text(header[:100]), _text(header[345:500])
    return f"{prefix}/{name}" if prefix and header[257:263] == b"ustar\0" else name


def _text(data: bytes) -> str:
    return data.split(b"\0")[0].decode("utf8", "surrogateescape")


def _damaged(file: Windowed, at: int, what: str) -> Unusable:
    return Unusable(f"data: {file.place.at(file.name)}: at byte {at:,} {what}; write this shard again")


def gone(file: Windowed, error: DecodeError) -> Unusable:
    """For a shard that changed while it was read."""
    return Unusable(f"data: {file.place.at(file.name)} cannot be read: it {error}; is it being written?")
