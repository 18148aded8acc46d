"""Write files and folders so that they appear complete or not at all.

All of it writes to a hidden temporary name in the same folder and renames it: a reader, or a crash at any moment, sees
the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paragan.core.errors import UsageError


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """Yield a hidden path beside `out`, to be made a file or a folder, and rename it to `out` if no error occurs.

    After an error the temporary path is removed. A file replaces an older one.

    Raises:
        UsageError: nothing can be written at `out`.
    """
    if not out.name:
        raise UsageError(f"{out}: is not a file name. Give the name of a file to write")
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:  # a signal may arrive at any moment
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            temporary.touch()
            temporary.unlink()
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror or error}: name another place") from None
        with name_full_disk(out):
            yield temporary
            temporary.replace(out)
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            with contextlib.suppress(OSError):
                temporary.unlink()


def require_absent(out: Path) -> None:
    """Raise UsageError if `out` exists already."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already: name a new one, or remove it first")


def atomic_write_bytes(path: Path, data: bytes, private: bool = False) -> None:
    """Write a file, flush it to disk and rename it to `path`: readers see the old file or the new one.

    private: only the owner may read it.
    """
    temporary = _temporary_path(path)
    try:
        with name_full_disk(path), temporary.open("wb") as file:
            if private:
                os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def create_exclusive(path: Path, data: bytes, fsync: bool = True) -> bool:
    """Create a file with `data` in it, unless it exists. Returns whether this call created it.

    Of all processes that try, on whatever hosts, exactly one succeeds: the file is written under a temporary name and
    hard-linked, which fails if the name exists.

    Args:
        path: the file.
        data: its contents, complete from the first moment it exists.
        fsync: flush it to disk before it gets its name.
    """
    if path.exists():  # the cheapest way to notice that another process was first
        return False
    temporary = _temporary_path(path)
    try:
        with name_full_disk(path), temporary.open("xb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.link(temporary, path)
        return True
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def name_full_disk(path: Path) -> Iterator[None]:
    """Add the name of a file, or of its folder, to the OSError of a full disk, which has none."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)
        raise


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a process id may occur on another host too
