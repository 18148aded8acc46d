"""Plots of float arrays as pictures, uint8 [H, W, 3]: 2-D points, curves, slices of volumes, rows of numbers.

Data sets of numbers (float32 [N, ...]) have no natural picture, so the plot is chosen by the shape of one record.
Scales are always those of the real samples.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from paragan.core.errors import UsageError

PLOT_SIDE_PX = 480
GREY = (190, 190, 190)
BLUE = (31, 90, 200)
WHITE = (255, 255, 255)
MAX_PANELS = 36  # samples drawn side by side
MAX_POINTS = 2000  # samples drawn into one scatter plot


def num_panels(shape: tuple[int, ...]) -> int:
    """Return how many samples a picture of records of this shape shows."""
    return MAX_POINTS if shape == (2,) else MAX_PANELS


def plot_arrays(samples: np.ndarray, reals: np.ndarray) -> np.ndarray:
    """Draw generated samples, and real ones where there is room, as one picture [H, W, 3] uint8.

    Args:
        samples: [n, ...] float, generated. A record of shape [2] is a point of a scatter plot, [C, L] a curve (the
            first channel), [C, H, W] a tile (the first channel), [C, D, H, W] a row of slices, anything else a row of
            pixels.
        reals: [m, ...] float, real records of the same shape.
    """
    shape = samples.shape[1:]
    if shape == (2,):
        return plot_scatter(samples, reals)
    if len(shape) == 2:
        return plot_curves(samples[:, 0], reals[:, 0])
    if len(shape) == 3:
        return plot_tiles(samples[:, 0], *_value_range(reals))
    if len(shape) == 4:
        volumes = samples[:12, 0]  # [n, D, H, W]
        return plot_tiles(volumes.reshape(-1, *volumes.shape[2:]), *_value_range(reals), columns=volumes.shape[1])
    return plot_tiles(samples.reshape(len(samples), 1, -1), *_value_range(reals), columns=1)


def plot_scatter(samples: np.ndarray, reals: np.ndarray) -> np.ndarray:
    """Draw points [n, 2] in blue over the real points [m, 2] in grey."""
    picture = Image.new("RGB", (PLOT_SIDE_PX, PLOT_SIDE_PX), WHITE)
    draw = ImageDraw.Draw(picture)
    low, high = reals.min(0), reals.max(0)
    margin = 0.1 * np.maximum(high - low, 1e-9)
    for points, color in ((reals, GREY), (samples, BLUE)):
        positions = (points - low + margin) / (high - low + 2 * margin) * PLOT_SIDE_PX
        for x, y in np.nan_to_num(positions).clip(-9, PLOT_SIDE_PX + 9).tolist():
            draw.ellipse((x - 1.5, PLOT_SIDE_PX - y - 1.5, x + 1.5, PLOT_SIDE_PX - y + 1.5), fill=color)
    return np.asarray(picture)


def plot_curves(samples: np.ndarray, reals: np.ndarray) -> np.ndarray:
    """Draw some of the real curves [m, L] in grey, and over them some of the samples [n, L] in blue."""
    picture = Image.new("RGB", (2 * PLOT_SIDE_PX, PLOT_SIDE_PX), WHITE)
    draw = ImageDraw.Draw(picture)
    low, high = _value_range(reals)
    x = np.linspace(0, 2 * PLOT_SIDE_PX - 1, samples.shape[1])
    for rows, color in ((reals[:MAX_PANELS], GREY), (samples[:MAX_PANELS], BLUE)):
        for row in rows:
            y = PLOT_SIDE_PX * (0.95 - 0.9 * (np.nan_to_num(row) - low) / (high - low)).clip(0, 1)
            draw.line([*zip(x.tolist(), y.tolist())], fill=color)
    return np.asarray(picture)


def plot_tiles(planes: np.ndarray, low: float, high: float, columns: int | None = None) -> np.ndarray:
    """Draw planes [n, H, W] as grey tiles, black at `low` and white at `high`, one pixel apart."""
    count, height, width = planes.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    scale = max(1, 64 // max(height, width))
    pixels = (255 * np.nan_to_num((planes - low) / (high - low)).clip(0, 1)).astype(np.uint8)
    tiles = np.full((rows * columns, height * scale + 1, width * scale + 1), 128, np.uint8)
    tiles[:count, :-1, :-1] = pixels.repeat(scale, 1).repeat(scale, 2)
    sheet = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2).reshape(rows * tiles.shape[1], -1)
    return sheet[:, :, None].repeat(3, 2)


def check_picture(picture: np.ndarray, owner: str) -> np.ndarray:
    """Return a picture drawn by user code as [H, W, 3].

    Args:
        picture: what `owner.picture(samples, reals)` returned; uint8 [H, W, 3] or [H, W, 1] is accepted.
        owner: name of the user's class, for messages.

    Raises:
        UsageError: it is not such an array.
    """
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3:
        raise UsageError(
            f"{owner}.picture(samples, reals): returned {type(picture).__name__}. Return a uint8 array [H, W, 3]"
        )
    if picture.shape[2] not in (1, 3) or 0 in picture.shape:
        raise UsageError(f"{owner}.picture(samples, reals): returned {list(picture.shape)}. Return [H, W, 3]")
    return picture.repeat(3 // picture.shape[2], 2)


def _value_range(reals: np.ndarray) -> tuple[float, float]:
    low, high = float(reals.min()), float(reals.max())
    return low, max(high, low + 1e-9)
