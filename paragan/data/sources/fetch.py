"""Bytes of a record, from wherever it lies."""

from __future__ import annotations

import errno
import time

from isal.isal_zlib import crc32

from paragan.data.decode import DecodeError
from paragan.data.places import Place
from paragan.errors import Failed

LARGEST = 2**28  # bytes of one record, packed or not: no image is larger, and a lie about sizes ends here
PAUSES_S = (0.1, 0.3, 1.0)  # before a machine that is in trouble is asked again
TROUBLE = {  # of the machine, or of the disk or mount that files lie on; no image is to blame
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN),
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EREMOTEIO),
}


def fetch(place: Place, name: str, start: int = 0, size: int | None = None, checksum: int | None = None) -> bytes:
    """As `place.read`. What the system says against this record alone is a `DecodeError`; trouble of the machine is
    waited for shortly, and then `Failed`.

    checksum : the CRC-32 that its index knows
    """
    if size is not None and size > LARGEST:
        raise DecodeError(f"takes {size:,} bytes, more than any image ({LARGEST:,})")
    try:
        data = place.read(name, start, size)
    except OSError as error:
        data = _again(place, name, start, size, error)
    if checksum is not None and crc32(data) != checksum:
        raise DecodeError("its checksum in the index is another: it was damaged")
    return data


def _again(place: Place, name: str, start: int, size: int | None, error: OSError) -> bytes:
    for pause_s in PAUSES_S:
        if error.errno not in TROUBLE:
            break
        time.sleep(pause_s)
        try:
            return place.read(name, start, size)
        except OSError as another:
            error = another
    reason = error.strerror or str(error)
    if error.errno not in TROUBLE:
        raise DecodeError(reason) from None
    remedy = "see to this machine's open files (`ulimit -n`), memory, disk and mounts"
    raise Failed(f"data: {place.at(name)} cannot be read: {reason} (tried {len(PAUSES_S) + 1} times): {remedy}")
