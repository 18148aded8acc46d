"""A contact sheet: a few images of every class, to be looked at before training."""

from __future__ import annotations

import numpy as np
from PIL import Image

from paragan.core.errors import Unusable
from paragan.core.image_grid import grid, readable
from paragan.data.decode import place
from paragan.data.source import DecodeError, Source
from paragan.data.tools.inspect_dataset import Survey

_COLUMNS, _ROWS = 8, 32  # images a class, classes
_CELL = 64  # pixels an image at most


def sheet(found: Survey) -> Image.Image:
    """A row of eight good images for each of up to 32 classes, or 64 images without classes, evenly chosen."""
    labels, good = found.source.labels, found.good
    if labels is None:
        rows = [_even(good, _COLUMNS * _COLUMNS)]
    else:
        of_class = [good[labels[good] == label] for label in _even(np.arange(len(found.source.classes)), _ROWS)]
        rows = [_even(members, _COLUMNS) for members in of_class]
    side, most = min(found.resolution, _CELL), max(map(len, rows))
    cells = np.zeros((len(rows), most, side, side, found.channels), np.uint8)
    for row, chosen in zip(cells, rows):
        for cell, index in zip(row, chosen):
            _draw(found.source, int(index), cell)
    flat = cells.reshape(-1, *cells.shape[2:])
    return grid(flat, columns=min(_COLUMNS, most), scale=readable(flat))


def _draw(source: Source, index: int, cell: np.ndarray) -> None:
    try:
        place(source.read(index), cell)
    except DecodeError as error:
        raise Unusable(f"data: {source.name(index)} changed while it was looked at: {error}; try again") from None


def _even(of: np.ndarray, most: int) -> np.ndarray:
    """At most so many, evenly chosen."""
    return of[np.linspace(0, len(of) - 1, min(len(of), most)).astype(int)]
