"""A folder of results that can be had again: found by what they are of, written whole or not at all, bounded."""

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

MAX_BYTES = 4 * 10**9  # of one kind; those used longest ago go first


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/paragan, or ~/.cache/paragan; where nothing can be kept, for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paragan"
    except RuntimeError:  # as in a container that runs under any number
        return Path(os.devnull) / "paragan"


def store(
    file: Path, write: Callable[[Path], object], max_bytes: int = MAX_BYTES, only_if_absent: bool = False
) -> None:
    """Keep what `write` writes as `file`; where the disk refuses that, do without. once: a file that is there stays, so
    that of several processes all have what the first of them kept."""
    aside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write(aside)
            os.link(aside, file) if only_if_absent else aside.replace(file)
            _evict(file.parent, file, max_bytes)
        finally:
            aside.unlink(missing_ok=True)


def touch(file: Path) -> None:
    """Say that a file was of use, so that others go before it."""
    with contextlib.suppress(OSError):
        os.utime(file)


def _evict(cache: Path, newest: Path, max_bytes: int) -> None:
    """Remove what was used longest ago, until `most` bytes are left; never what was just written."""
    found, total = {file: file.stat() for file in cache.iterdir() if file.is_file()}, 0
    for file in sorted(found, key=lambda file: (file != newest, -found[file].st_mtime)):
        total += found[file].st_size
        if file != newest and total > max_bytes:  # another process may have removed the newest
            file.unlink(missing_ok=True)
