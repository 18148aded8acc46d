"""Bytes of a record, from wherever it lies."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager

from isal.isal_zlib import crc32

from paragan.core.errors import Failed
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import Place
from paragan.data.storage.local import Here

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


class Steady:
    """A file of this machine as it is now. (A far one is watched by its place.)

    What is written over it would give new images the labels of old ones. One that is removed stays as it is while open.
    """

    def __init__(self, place: Place, name: str):
        self.path = place.path / name if isinstance(place, Here) and not place.remote else None
        self.where, self.was = place.at(name), self._now()

    def check(self) -> None:
        """Raise `Failed` where it is another now."""
        if self._now() not in (self.was, None):
            raise Failed(f"data: {self.where} was changed while it was used: leave it as it is, or begin anew with it")

    @contextmanager
    def read(self) -> Iterator[None]:
        """Around reading from it: what does not look damaged was not changed either, and what does may have been."""
        try:
            yield
        except DecodeError:
            self.check()
            raise
        self.check()

    def _now(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat() if self.path else None
        except OSError:
            return None
        return found and (found.st_ino, found.st_size, found.st_mtime_ns)
