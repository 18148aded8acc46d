"""Record what makes the host wait for the stand-in accelerator."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ("paragan", "examples", "tests")
HELPERS = ("paragan/core/host_copies.py", "paragan/core/backends.py")  # which wait where their callers ask them to
NOWHERE = "autograd, or a library"
_recordings: list[list[Sync]] = []


@dataclass(frozen=True)
class Sync:
    """One wait: the operation, and the innermost line of the package that caused it (of a test, if there is none).

    place : the same without the number of the line: file and function
    """

    name: str
    line: str
    place: str

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
        _recordings[:] = [other for other in _recordings if other is not syncs]


def record(name: str) -> None:
    """Note that the host waits."""
    if _recordings:
        sync = Sync(name, *_calling_line())
        for syncs in _recordings:
            syncs.append(sync)


def _calling_line() -> tuple[str, str]:
    frames = traceback.extract_stack()[::-1]
    for source in SOURCES:
        for i, frame in enumerate(frames):
            path = Path(frame.filename)
            if path.is_relative_to(ROOT / source) and not _is_own(path):
                file = path.relative_to(ROOT)
                function = next(outer.name for outer in frames[i:] if not outer.name.startswith("<"))  # of <listcomp>
                return f"{file}:{frame.lineno}", f"{file} {function}"
    return NOWHERE, NOWHERE


def _is_own(path: Path) -> bool:
    is_part = path.parent == HERE and not path.name.startswith("test_")
    return is_part or str(path.relative_to(ROOT)) in HELPERS
