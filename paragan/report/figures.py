"""Figures made with the model and the data, as the run folder has them: nearest neighbors, interpolations.

RUN/figures/figures.json, written by train/callbacks/report_figures.py:
    {"figures": [{"title", "description", "strips": [{"file", "caption", "alt"}]}], "missing_reasons": [...]}
RUN/figures/*.png
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.report import number_format
from paragan.report.embedded_images import EmbeddedImage, embed_image

FIGURES_DIR = "figures"
INDEX_FILE = "figures.json"
MAX_STRIPS = 48  # of all figures of a page
MAX_MISSING_REASONS = 9
MAX_DESCRIPTION_CHARS = 600


@dataclass(frozen=True)
class EmbeddedStrip:
    """Images in a row, as one picture."""

    image: EmbeddedImage
    caption: str
    alt: str


@dataclass(frozen=True)
class EmbeddedFigure:
    """A titled group of strips."""

    title: str
    description: str
    strips: tuple[EmbeddedStrip, ...]


@dataclass(frozen=True)
class ReportFigures:
    """All figures of a run."""

    figures: tuple[EmbeddedFigure, ...] = ()
    missing_reasons: tuple[str, ...] = ()  # why figures are missing

    @property
    def num_chars(self) -> int:
        """Characters of a page that the images take."""
        return sum(len(strip.image.uri) for figure in self.figures for strip in figure.strips)


def read_index(run_dir: Path) -> dict[str, Any]:
    """Return the content of figures.json, or {} if it is missing or not readable."""
    try:
        index = json.loads((run_dir / FIGURES_DIR / INDEX_FILE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return index if isinstance(index, dict) else {}


def load_figures(run_dir: Path, max_chars: int) -> ReportFigures:
    """Load the figures of a run folder, in at most `max_chars` characters of page."""
    index = read_index(run_dir)
    entries = [entry for entry in _get_list(index, "figures") if isinstance(entry, dict)]
    num_strips = sum(len(_get_list(entry, "strips")) for entry in entries)
    chars_per_strip = max_chars // max(1, min(MAX_STRIPS, num_strips))
    strips_left = MAX_STRIPS
    figures: list[EmbeddedFigure] = []
    for entry in entries:
        strips = tuple(_load_strips(run_dir / FIGURES_DIR, _get_list(entry, "strips")[:strips_left], chars_per_strip))
        strips_left -= len(strips)
        if strips:
            title = number_format.format_value(entry.get("title", ""))
            description = str(entry.get("description", ""))[:MAX_DESCRIPTION_CHARS]
            figures.append(EmbeddedFigure(title, description, strips))
    reasons = _get_list(index, "missing_reasons")[:MAX_MISSING_REASONS]
    return ReportFigures(tuple(figures), tuple(number_format.format_value(reason) for reason in reasons))


def _load_strips(folder: Path, entries: list[Any], max_chars: int) -> Iterator[EmbeddedStrip]:
    for entry in entries:
        name = str(entry.get("file", "")) if isinstance(entry, dict) else ""
        if not name or Path(name).name != name:  # only files of this folder
            continue
        if image := embed_image(folder / name, max_chars):
            caption = number_format.format_value(entry.get("caption", ""))
            yield EmbeddedStrip(image, caption, number_format.format_value(entry.get("alt", "")))


def _get_list(index: dict[str, Any], key: str) -> list[Any]:
    value = index.get(key)
    return value if isinstance(value, list) else []
