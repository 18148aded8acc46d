"""Pictures that took the model and the data to make, as they lie in the run folder: neighbours, interpolations.

RUN/exhibits/exhibits.json    {"shown": [{"title", "about", "strips": [{"file", "caption", "alt"}]}], "missing": [...]}
RUN/exhibits/*.png
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.report import number_format
from paragan.report.embedded_images import Picture, picture_in

FOLDER, INDEX = "exhibits", "exhibits.json"
STRIPS = 48  # a page shows at most
ABOUT = 600  # characters


@dataclass(frozen=True)
class Strip:
    """Images side by side."""

    picture: Picture
    caption: str
    alt: str


@dataclass(frozen=True)
class Exhibit:
    title: str
    about: str
    strips: tuple[Strip, ...]


@dataclass(frozen=True)
class Exhibits:
    shown: tuple[Exhibit, ...] = ()
    missing: tuple[str, ...] = ()  # why what is not there is not

    @property
    def room(self) -> int:
        """Characters of page that the pictures take."""
        return sum(len(strip.picture.uri) for exhibit in self.shown for strip in exhibit.strips)


def read_index(run_dir: Path) -> dict[str, Any]:
    """What exhibits.json says; empty where there is none that can be read."""
    try:
        index = json.loads((run_dir / FOLDER / INDEX).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return index if isinstance(index, dict) else {}


def exhibits(run_dir: Path, room: int) -> Exhibits:
    """What the run has to show, in at most `room` characters of page."""
    index = read_index(run_dir)
    told = [one for one in _listed(index, "shown") if isinstance(one, dict)]
    limit = room // max(1, min(STRIPS, sum(len(_listed(one, "strips")) for one in told)))
    left, shown = STRIPS, list[Exhibit]()
    for one in told:
        strips = tuple(_strips(run_dir / FOLDER, _listed(one, "strips")[:left], limit))
        left -= len(strips)
        if strips:
            shown.append(Exhibit(number_format.value(one.get("title", "")), str(one.get("about", ""))[:ABOUT], strips))
    return Exhibits(tuple(shown), tuple(number_format.value(one) for one in _listed(index, "missing")[:9]))


def _strips(folder: Path, listed: list[Any], limit: int) -> Iterator[Strip]:
    for one in listed:
        name = str(one.get("file", "")) if isinstance(one, dict) else ""
        if not name or Path(name).name != name:  # another folder is none of ours
            continue
        if picture := picture_in(folder / name, limit):
            yield Strip(picture, number_format.value(one.get("caption", "")), number_format.value(one.get("alt", "")))


def _listed(index: dict[str, Any], key: str) -> list[Any]:
    found = index.get(key)
    return found if isinstance(found, list) else []
