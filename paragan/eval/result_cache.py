"""A cache folder of results that can be computed again: files are written atomically, and their size is bounded."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

MAX_BYTES = 4 * 10**9  # in one folder; the least recently used files are removed first


def cache_dir() -> Path:
    """Return $XDG_CACHE_HOME/paragan or ~/.cache/paragan; for users without a home a path that cannot be written."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paragan"
    except RuntimeError:  # no home, as for arbitrary user ids in containers
        return Path(os.devnull) / "paragan"


def store(
    file: Path, write: Callable[[Path], object], max_bytes: int = MAX_BYTES, only_if_absent: bool = False
) -> None:
    """Write a file atomically into the cache; do nothing if the disk refuses it.

    Args:
        file: Path in a folder of the cache.
        write: Called with the path of a temporary file to write.
        max_bytes: Limit of the folder.
        only_if_absent: Do not replace an existing file, so that several processes all use the first one.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            if only_if_absent:
                os.link(temporary, file)
            else:
                temporary.replace(file)
            _evict(file.parent, file, max_bytes)
        finally:
            temporary.unlink(missing_ok=True)


def touch(file: Path) -> None:
    """Mark a file as recently used."""
    with contextlib.suppress(OSError):
        os.utime(file)


def _evict(cache: Path, newest: Path, max_bytes: int) -> None:
    """Remove the least recently used files down to `max_bytes`, but never `newest`."""
    stats = {file: file.stat() for file in cache.iterdir() if file.is_file()}
    total = 0
    for file in sorted(stats, key=lambda file: (file != newest, -stats[file].st_mtime)):
        total += stats[file].st_size
        if file != newest and total > max_bytes:  # another process may have removed the newest
            file.unlink(missing_ok=True)
