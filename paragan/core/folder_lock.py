"""The lock of a folder: one process at a time writes there. The system gives it back when the process ends."""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from pathlib import Path
from typing import TextIO

LOCK_FILE = ".lock"
SHARED_TIMEOUT_S = 5.0  # how long to wait for processes that only look
OWNED_TIMEOUT_S = 0.05  # and for an owner, which may be ending
ATTEMPT_INTERVAL_S = 0.01


class FolderLock:
    """The lock of a folder, as one process sees it. Its forked children do not hold it, and may outlive it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._file: TextIO | None = None
        _locks.add(self)

    def acquire(self) -> bool:
        """Own the folder until this process ends, and make it if it does not exist. Return False if another does."""
        if self._file:
            return True
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = (self.folder / LOCK_FILE).open("a+")
        if not _lock(self._file):
            self.release()
            return False
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()
        return True

    def release(self) -> None:
        """Give the lock back, if this process holds it."""
        if self._file:
            self._file.close()
        self._file = None


_locks = weakref.WeakSet[FolderLock]()


def _release_in_child() -> None:
    for lock in list(_locks):
        lock.release()  # closes this process's descriptor: the lock itself stays with the parent


os.register_at_fork(after_in_child=_release_in_child)


def _lock(file: TextIO) -> bool:
    """Lock a file for this process alone, once those that share its lock for an instant (`lock_owner`) are done."""
    start_s = time.monotonic()
    while not _try_lock(file, fcntl.LOCK_EX):
        timeout_s = SHARED_TIMEOUT_S if _try_lock(file, fcntl.LOCK_SH) else OWNED_TIMEOUT_S
        fcntl.flock(file, fcntl.LOCK_UN)
        if time.monotonic() - start_s > timeout_s:
            return False
        time.sleep(ATTEMPT_INTERVAL_S)
    return True


def _try_lock(file: TextIO, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    except OSError:
        return False


def lock_owner(folder: Path) -> str:
    """Return who holds the lock of a folder ("process 4711 on gpu07"), or "" if no process does."""
    path = folder / LOCK_FILE
    try:
        with path.open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except FileNotFoundError:
        return ""
    except OSError:
        return read_lock_owner(folder)


def read_lock_owner(folder: Path) -> str:
    """Return the last process that held the lock of a folder, for messages."""
    try:
        return (folder / LOCK_FILE).read_text(errors="replace") or "another process"
    except OSError:
        return "another process"
