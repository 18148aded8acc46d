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
from paragan.report.embedded_images import EmbeddedImage, embed_image

FIGURES_DIR, INDEX_FILE = "exhibits", "exhibits.json"
MAX_STRIPS = 48  # a page shows at most
MAX_DESCRIPTION_CHARS = 600  # characters


@dataclass(frozen=True)
class EmbeddedStrip:
    """Images side by side."""

    image: EmbeddedImage
    caption: str
    alt: str


@dataclass(frozen=True)
class EmbeddedFigure:
    title: str
    description: str
    strips: tuple[EmbeddedStrip, ...]


@dataclass(frozen=True)
class ReportFigures:
    figures: tuple[EmbeddedFigure, ...] = ()
    missing_reasons: tuple[str, ...] = ()  # why what is not there is not

    @property
    def num_chars(self) -> int:
        """Characters of page that the pictures take."""
        return sum(len(strip.image.uri) for exhibit in self.figures for strip in exhibit.strips)


def read_index(run_dir: Path) -> dict[str, Any]:
    """What exhibits.json says; empty where there is none that can be read."""
    try:
        index = json.loads((run_dir / FIGURES_DIR / INDEX_FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return index if isinstance(index, dict) else {}


def load_figures(run_dir: Path, max_chars: int) -> ReportFigures:
    """What the run has to show, in at most `room` characters of page."""
    index = read_index(run_dir)
    told = [one for one in _get_list(index, "shown") if isinstance(one, dict)]
    limit = max_chars // max(1, min(MAX_STRIPS, sum(len(_get_list(one, "strips")) for one in told)))
    left, shown = MAX_STRIPS, list[EmbeddedFigure]()
    for one in told:
        strips = tuple(_load_strips(run_dir / FIGURES_DIR, _get_list(one, "strips")[:left], limit))
        left -= len(strips)
        if strips:
            shown.append(
                EmbeddedFigure(
                    number_format.format_value(one.get("title", "")),
                    str(one.get("about", ""))[:MAX_DESCRIPTION_CHARS],
                    strips,
                )
            )
    return ReportFigures(
        tuple(shown), tuple(number_format.format_value(one) for one in _get_list(index, "missing")[:9])
    )


def _load_strips(folder: Path, entries: list[Any], max_chars: int) -> Iterator[EmbeddedStrip]:
    for one in entries:
        name = str(one.get("file", "")) if isinstance(one, dict) else ""
        if not name or Path(name).name != name:  # another folder is none of ours
            continue
        if picture := embed_image(folder / name, max_chars):
            yield EmbeddedStrip(
                picture,
                number_format.format_value(one.get("caption", "")),
                number_format.format_value(one.get("alt", "")),
            )


def _get_list(index: dict[str, Any], key: str) -> list[Any]:
    found = index.get(key)
    return found if isinstance(found, list) else []
