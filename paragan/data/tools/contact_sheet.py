"""A contact sheet: a few images of every class, to be looked at before training."""

from __future__ import annotations

import numpy as np
from PIL import Image

from paragan.core.errors import UsageError
from paragan.core.image_grid import integer_upscale, make_grid
from paragan.data.decode import decode_into
from paragan.data.source import DecodeError, Source
from paragan.data.tools.inspect_dataset import DatasetReport

_COLUMNS, _ROWS = 8, 32  # images a class, classes
_MAX_CELL_PX = 64  # pixels an image at most


def make_contact_sheet(report: DatasetReport) -> Image.Image:
    """A row of eight good images for each of up to 32 classes, or 64 images without classes, evenly chosen."""
    labels, good = report.source.labels, report.good_indices
    if labels is None:
        rows = [_evenly_spaced(good, _COLUMNS * _COLUMNS)]
    else:
        of_class = [
            good[labels[good] == label] for label in _evenly_spaced(np.arange(len(report.source.classes)), _ROWS)
        ]
        rows = [_evenly_spaced(members, _COLUMNS) for members in of_class]
    side, most = min(report.resolution, _MAX_CELL_PX), max(map(len, rows))
    cells = np.zeros((len(rows), most, side, side, report.channels), np.uint8)
    for row, chosen in zip(cells, rows):
        for cell, index in zip(row, chosen):
            _decode_cell(report.source, int(index), cell)
    flat = cells.reshape(-1, *cells.shape[2:])
    return make_grid(flat, columns=min(_COLUMNS, most), scale=integer_upscale(flat))


def _decode_cell(source: Source, index: int, cell: np.ndarray) -> None:
    try:
        decode_into(source.read(index), cell)
    except DecodeError as error:
        raise UsageError(
            f"data: {source.sample_name(index)} changed while it was looked at: {error}; try again"
        ) from None


def _evenly_spaced(indices: np.ndarray, max_count: int) -> np.ndarray:
    """At most so many, evenly chosen."""
    return indices[np.linspace(0, len(indices) - 1, min(len(indices), max_count)).astype(int)]
