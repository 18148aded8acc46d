"""A contact sheet: a few images of every class, to check the data before training."""

from __future__ import annotations

import numpy as np
from PIL import Image

from paragan.core.errors import UsageError
from paragan.core.image_grid import integer_upscale, make_grid
from paragan.data.decode import decode_into
from paragan.data.source import DecodeError
from paragan.data.tools.inspect_dataset import DatasetReport

_COLUMNS = 8  # images of a class
_ROWS = 32  # classes
_MAX_CELL_PX = 64


def make_contact_sheet(report: DatasetReport) -> Image.Image:
    """Draw a row of eight good images for each of up to 32 classes, or 64 images without classes, evenly spaced.

    Raises:
        UsageError: an image that could be decoded before cannot be decoded now.
    """
    labels = report.source.labels
    good = report.good_indices
    if labels is None:
        rows = [_evenly_spaced(good, _COLUMNS * _COLUMNS)]
    else:
        classes = _evenly_spaced(np.arange(len(report.source.classes)), _ROWS)
        rows = [_evenly_spaced(good[labels[good] == label], _COLUMNS) for label in classes]
    size = report.size.fit_within(_MAX_CELL_PX)
    num_columns = max(map(len, rows))
    cells = np.zeros((len(rows), num_columns, size.height, size.width, report.channels), np.uint8)
    for row, indices in zip(cells, rows):
        for cell, index in zip(row, indices):
            _decode_cell(report, int(index), cell)
    flat = cells.reshape(-1, *cells.shape[2:])
    return make_grid(flat, columns=min(_COLUMNS, num_columns), scale=integer_upscale(flat))


def _decode_cell(report: DatasetReport, index: int, cell: np.ndarray) -> None:
    source = report.source
    try:
        decode_into(source.read(index), cell, report.value_range)
    except DecodeError as error:
        raise UsageError(
            f"data: {source.sample_name(index)} changed while it was inspected: {error}. Try again"
        ) from None


def _evenly_spaced(indices: np.ndarray, max_count: int) -> np.ndarray:
    """Return at most `max_count` of the indices, evenly spaced."""
    return indices[np.linspace(0, len(indices) - 1, min(len(indices), max_count)).astype(int)]
