"""Numbers as pictures, uint8 [H, W, 3]: points in the plane, curves, slices of volumes, rows of numbers."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

from paragan.core.errors import UsageError

PLOT_SIDE_PX = 480  # pixels of a plot
GREY, BLUE, WHITE = (190, 190, 190), (31, 90, 200), (255, 255, 255)
MAX_PANELS, MAX_POINTS = 36, 2000  # samples that are drawn, one beside the other or all in one


def num_panels(shape: tuple[int, ...]) -> int:
    """Samples that a picture of records of this shape has."""
    return MAX_POINTS if shape == (2,) else MAX_PANELS


def plot_arrays(samples: np.ndarray, reals: np.ndarray) -> np.ndarray:
    """Samples [n, ...] beside or over reals [m, ...], by their shape: [2] points in the plane; [C, L] curves, a colour
    for real and one for made; [C, H, W] tiles, the first channel; [C, D, H, W] a row of slices each; else a line of
    numbers each. Scales are those of the reals."""
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
    """Points [n, 2] in blue over those of the reals [m, 2] in grey."""
    picture = Image.new("RGB", (PLOT_SIDE_PX, PLOT_SIDE_PX), WHITE)
    pen, low, high = ImageDraw.Draw(picture), reals.min(0), reals.max(0)
    margin = 0.1 * np.maximum(high - low, 1e-9)
    for points, colour in ((reals, GREY), (samples, BLUE)):
        at = (points - low + margin) / (high - low + 2 * margin) * PLOT_SIDE_PX
        for x, y in np.nan_to_num(at).clip(-9, PLOT_SIDE_PX + 9).tolist():
            pen.ellipse((x - 1.5, PLOT_SIDE_PX - y - 1.5, x + 1.5, PLOT_SIDE_PX - y + 1.5), fill=colour)
    return np.asarray(picture)


def plot_curves(samples: np.ndarray, reals: np.ndarray) -> np.ndarray:
    """[n, L] and [m, L]: some of the reals in grey, some of the samples in blue."""
    picture = Image.new("RGB", (2 * PLOT_SIDE_PX, PLOT_SIDE_PX), WHITE)
    pen, (low, high) = ImageDraw.Draw(picture), _value_range(reals)
    across = np.linspace(0, 2 * PLOT_SIDE_PX - 1, samples.shape[1])
    for rows, colour in ((reals[:MAX_PANELS], GREY), (samples[:MAX_PANELS], BLUE)):
        for row in rows:
            y = PLOT_SIDE_PX * (0.95 - 0.9 * (np.nan_to_num(row) - low) / (high - low)).clip(0, 1)
            pen.line([*zip(across.tolist(), y.tolist())], fill=colour)
    return np.asarray(picture)


def plot_tiles(planes: np.ndarray, low: float, high: float, columns: int | None = None) -> np.ndarray:
    """[n, H, W] as grey squares, black at `low`, white at `high`; one pixel between them."""
    count, height, width = planes.shape
    columns = columns or math.ceil(math.sqrt(count))
    rows, scale = math.ceil(count / columns), max(1, 64 // max(height, width))
    shown = (255 * np.nan_to_num((planes - low) / (high - low)).clip(0, 1)).astype(np.uint8)
    framed = np.full((rows * columns, height * scale + 1, width * scale + 1), 128, np.uint8)
    framed[:count, :-1, :-1] = shown.repeat(scale, 1).repeat(scale, 2)
    sheet = framed.reshape(rows, columns, *framed.shape[1:]).swapaxes(1, 2).reshape(rows * framed.shape[1], -1)
    return sheet[:, :, None].repeat(3, 2)


def check_picture(picture: np.ndarray, owner: str) -> np.ndarray:
    """A picture of somebody's own, [H, W, 3]. Unusable where it is none."""
    if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.ndim != 3:
        raise UsageError(f"{owner}.picture(samples, reals) gives no uint8 array [H, W, 3]")
    if picture.shape[2] not in (1, 3) or 0 in picture.shape:
        raise UsageError(f"{owner}.picture gives {list(picture.shape)}, not [H, W, 3]")
    return picture.repeat(3 // picture.shape[2], 2)


def _value_range(reals: np.ndarray) -> tuple[float, float]:
    low, high = float(reals.min()), float(reals.max())
    return low, max(high, low + 1e-9)
