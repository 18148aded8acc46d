"""Whether a file that has no checksums is still what it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paragan.data.decode import DecodeError
from paragan.data.places import Here, Place
from paragan.errors import Failed


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
