"""Read the bytes of a record, and notice files that change while a run reads them.

Old and new contents are never mixed: a remote file keeps the version that was read first (`storage.remote`), a local
file without checksums its date and size (`FileStamp`). A change is reported by name.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager

from isal.isal_zlib import crc32

from paragan.core.errors import RunError
from paragan.data.decode import DEFAULT_MAX_PIXELS, pixels_limit
from paragan.data.source import DecodeError
from paragan.data.storage.filesystem import FileSystem

MAX_RECORD_BYTES = 2**28  # of one record, encoded or not: no image is larger, so a wrong size in an index fails early
MAX_HEADER_BYTES = 2**17  # before a member of an archive
RETRY_DELAYS_S = (0.1, 0.3, 1.0)  # after a transient error
TRANSIENT_ERRNOS = {  # caused by the machine, its disk or a mount, not by the image
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN),
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EREMOTEIO),
}


def read_span(fs: FileSystem, name: str, start: int = 0, size: int | None = None, checksum: int | None = None) -> bytes:
    """Read the bytes of a record as `fs.read` does.

    Args:
        fs: the folder of the file.
        name: the file.
        start: first byte.
        size: number of bytes; None for the rest of the file.
        checksum: the expected CRC-32, if known.

    Raises:
        DecodeError: the record is damaged, or the system reports an error of this file alone.
        RunError: a transient error of the machine lasts for all of RETRY_DELAYS_S.
    """
    if size is not None and size > max_record_bytes():
        raise DecodeError(too_long_message(size))
    try:
        data = fs.read(name, start, size)
    except OSError as error:
        data = _retry_read(fs, name, start, size, error)
    if checksum is not None and crc32(data) != checksum:
        raise DecodeError("does not match its checksum in the index: it was damaged")
    return data


def max_record_bytes() -> int:
    """Return the bytes that a record may have: more where larger images were asked for, 4 for each of their pixels."""
    limit = pixels_limit()
    if limit is None or limit <= DEFAULT_MAX_PIXELS:
        return MAX_RECORD_BYTES
    return max(MAX_RECORD_BYTES, 4 * limit)


def too_long_message(size: int) -> str:
    """Return why a record of `size` bytes is refused, and what reads it nevertheless, with its header in an archive."""
    return (
        f"takes {size:,} bytes, more than any image ({max_record_bytes():,}). If it is to be trusted, "
        f"--data.max_pixels={-(-(size + MAX_HEADER_BYTES) // 4)} reads it"
    )


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
    remedy = "check this machine's open files (`ulimit -n`), memory, disk and mounts"
    raise RunError(
        f"data: {fs.display_path(name)} cannot be read: {reason} (tried {len(RETRY_DELAYS_S) + 1} times): {remedy}"
    )


class FileStamp:
    """Inode, size and date of a local file when it was opened, to notice changes. (A remote file is checked by
    `RemoteFileSystem`.)

    An overwritten file would give new images the labels of old ones. A removed file stays readable while it is open.

    Args:
        fs: the folder of the file.
        name: the file.
    """

    def __init__(self, fs: FileSystem, name: str):
        self.path = fs.local_root / name if fs.local_root else None
        self.location = fs.display_path(name)
        self.stat = self._current_stat()

    def check_unchanged(self) -> None:
        """Raise RunError if the file has changed."""
        if self._current_stat() not in (self.stat, None):
            raise RunError(
                f"data: {self.location} was changed while it was used: restore it, or start a new run with it"
            )

    @contextmanager
    def checked_read(self) -> Iterator[None]:
        """Check after a read, also after one that found damage, that the file has not changed."""
        try:
            yield
        except DecodeError:
            self.check_unchanged()
            raise
        self.check_unchanged()

    def _current_stat(self) -> tuple[int, int, int] | None:
        try:
            stat = self.path.stat() if self.path else None
        except OSError:
            return None
        return stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns)
