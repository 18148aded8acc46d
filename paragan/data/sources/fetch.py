"""Bytes of a record, from wherever it lies."""

from __future__ import annotations

from isal.isal_zlib import crc32

from paragan.data.decode import DecodeError
from paragan.data.places import Place

LARGEST = 2**28  # bytes of one record, packed or not: no image is larger, and a lie about sizes ends here


def fetch(place: Place, name: str, start: int = 0, size: int | None = None, checksum: int | None = None) -> bytes:
    """As `place.read`; what the system says against it is about this record alone. Raises `DecodeError`, `Failed`.

    checksum : the CRC-32 that its index knows
    """
    if size is not None and size > LARGEST:
        raise DecodeError(f"takes {size:,} bytes, more than any image ({LARGEST:,})")
    try:
        data = place.read(name, start, size)
    except OSError as error:
        raise DecodeError(error.strerror or str(error)) from None
    if checksum is not None and crc32(data) != checksum:
        raise DecodeError("its checksum in the index is another: it was damaged")
    return data
