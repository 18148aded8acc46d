"""What made the host wait for the stand-in accelerator."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("paragan", "examples", "tests")
_recordings: list[list[Sync]] = []


@dataclass(frozen=True)
class Sync:
    """One wait: the operation, and the innermost line of the package that caused it (of a test, if there is none)."""

    name: str
    line: str

    def __str__(self) -> str:
        return f"{self.line}: {self.name}"


@contextlib.contextmanager
def recording() -> Generator[list[Sync]]:
    """Collect the waits inside this context."""
    syncs: list[Sync] = []
    _recordings.append(syncs)
    try:
        yield syncs
    finally:
        _recordings.remove(syncs)


def record(name: str) -> None:
    """Note that the host waits."""
    if _recordings:
        sync = Sync(name, _calling_line())
        for syncs in _recordings:
            syncs.append(sync)


def _calling_line() -> str:
    frames = traceback.extract_stack()
    for source in SOURCES:
        for frame in reversed(frames):
            path = Path(frame.filename)
            if path.is_relative_to(ROOT / source) and "standin" not in path.parts:
                return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "autograd, or a library"
