"""Files and folders that are there complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paragan.core.errors import UsageError


@contextmanager
def atomic_output(out: Path) -> Iterator[Path]:
    """A hidden path next to `out`, to be made a file or a folder; it is renamed to `out` if all went well, and removed
    if not. A file replaces an older one. Raises `Unusable` where nothing can be written."""
    if not out.name:
        raise UsageError(f"{out} names no file: give a name to be made")
    hidden = out.with_name(f".{out.name}.{os.getpid()}")
    try:  # a signal may come at any moment
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            hidden.touch()
            hidden.unlink()
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error.strerror or error}: name another place") from None
        yield hidden
        hidden.replace(out)
    finally:
        if hidden.is_dir():
            shutil.rmtree(hidden)
        else:
            with contextlib.suppress(OSError):
                hidden.unlink()


def require_absent(out: Path) -> None:
    """Raise `Unusable` for what is there already."""
    if out.exists() or out.is_symlink():
        raise UsageError(f"{out} exists already: name a new one, or remove it first")


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Write aside, then rename: whoever looks and whatever crashes, `path` is the old file or the new one."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")  # a process of another host may have our number
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def create_exclusive(path: Path, data: bytes, fsync: bool = True) -> bool:
    """Make a file that is not there yet, whole from the first moment on. False if it is there: of all processes that
    try, on whatever hosts, one succeeds. sync: whether it has to be on the disk then."""
    if path.exists():  # by far the cheapest way to be too late
        return False
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with aside.open("xb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        os.link(aside, path)
        return True
    except FileExistsError:
        return False
    finally:
        aside.unlink(missing_ok=True)
