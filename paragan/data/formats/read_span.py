"""Bytes of a record, from wherever it lies."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager

from isal.isal_zlib import crc32

from paragan.core.errors import RunError
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import FileSystem
from paragan.data.storage.local import LocalFileSystem

MAX_RECORD_BYTES = 2**28  # bytes of one record, packed or not: no image is larger, and a lie about sizes ends here
RETRY_DELAYS_S = (0.1, 0.3, 1.0)  # before a machine that is in trouble is asked again
TRANSIENT_ERRNOS = {  # of the machine, or of the disk or mount that files lie on; no image is to blame
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN),
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EREMOTEIO),
}


def read_span(fs: FileSystem, name: str, start: int = 0, size: int | None = None, checksum: int | None = None) -> bytes:
    """As `place.read`. What the system says against this record alone is a `DecodeError`; trouble of the machine is
    waited for shortly, and then `Failed`.

    checksum : the CRC-32 that its index knows
    """
    if size is not None and size > MAX_RECORD_BYTES:
        raise DecodeError(f"takes {size:,} bytes, more than any image ({MAX_RECORD_BYTES:,})")
    try:
        data = fs.read(name, start, size)
    except OSError as error:
        data = _retry_read(fs, name, start, size, error)
    if checksum is not None and crc32(data) != checksum:
        raise DecodeError("its checksum in the index is another: it was damaged")
    return data


def _retry_read(fs: FileSystem, name: str, start: int, size: int | None, error: OSError) -> bytes:
    for pause_s in RETRY_DELAYS_S:
        if error.errno not in TRANSIENT_ERRNOS:
            break
        time.sleep(pause_s)
        try:
            return fs.read(name, start, size)
        except OSError as another:
            error = another
    reason = error.strerror or str(error)
    if error.errno not in TRANSIENT_ERRNOS:
        raise DecodeError(reason) from None
    remedy = "see to this machine's open files (`ulimit -n`), memory, disk and mounts"
    raise RunError(
        f"data: {fs.display_path(name)} cannot be read: {reason} (tried {len(RETRY_DELAYS_S) + 1} times): {remedy}"
    )


class FileStamp:
    """A file of this machine as it is now. (A far one is watched by its place.)

    What is written over it would give new images the labels of old ones. One that is removed stays as it is while open.
    """

    def __init__(self, fs: FileSystem, name: str):
        self.path = fs.root / name if isinstance(fs, LocalFileSystem) and not fs.is_remote else None
        self.location, self.stat = fs.display_path(name), self._current_stat()

    def check_unchanged(self) -> None:
        """Raise `Failed` where it is another now."""
        if self._current_stat() not in (self.stat, None):
            raise RunError(
                f"data: {self.location} was changed while it was used: leave it as it is, or begin anew with it"
            )

    @contextmanager
    def checked_read(self) -> Iterator[None]:
        """Around reading from it: what does not look damaged was not changed either, and what does may have been."""
        try:
            yield
        except DecodeError:
            self.check_unchanged()
            raise
        self.check_unchanged()

    def _current_stat(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat() if self.path else None
        except OSError:
            return None
        return found and (found.st_ino, found.st_size, found.st_mtime_ns)
