"""Curves over kimg as inline SVG that takes its colours and font from the page."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from paragan.report import number_format

MAX_POINTS = 500  # of a line
MAX_DOTS = 40  # of a line: its values have dots if there are no more of them
WIDTH, HEIGHT = 360, 173  # px, a phone's width
LEFT, RIGHT, TOP, BOTTOM = 47, 357, 5, 147  # of the axes, in px


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str
    kimg: Sequence[float]
    values: Sequence[float]
    colour: str  # a CSS variable of the page, without its dashes: g, d, real, other, r1 to r8
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart: its SVG, and the texts that the page puts around it."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    notes: tuple[str, ...]
    svg: Markup


def make_chart(
    title: str, unit: str, lines: Sequence[Line], y_floor: float = math.inf, marks_kimg: Sequence[float] = ()
) -> Chart | None:
    """Draw a chart, or return None if no line has a value to draw.

    Args:
        y_floor: the y axis starts here or lower; 0 for amounts, infinity to start at the data.
        marks_kimg: positions of vertical lines.
    """
    lines = tuple(line for line in lines if _is_drawable(line.values).any())
    if not lines:
        return None
    values = np.concatenate([np.asarray(line.values, float) for line in lines])
    low, high = axis_limits(values[_is_drawable(values)], y_floor)
    num_nonfinite = int((~np.isfinite(values)).sum())
    num_outside = int((np.isfinite(values) & ((values < low) | (values > high))).sum())
    notes: list[str] = []
    if num_nonfinite:
        notes.append(f"{num_nonfinite:,} of {values.size:,} not finite")
    if num_outside:
        notes.append(f"{num_outside:,} of {values.size:,} beyond the axis")
    return Chart(title, unit, lines, tuple(notes), _render_svg(title, lines, (low, high), marks_kimg))


def downsample_indices(values: NDArray[np.float64], max_points: int = MAX_POINTS) -> NDArray[np.intp]:
    """Return the indices of points to draw: the lowest, the highest and a gap of every section, so that spikes stay."""
    if values.size <= max_points:
        return np.arange(values.size)
    keep = {0, values.size - 1}
    for section in np.array_split(np.arange(values.size), (max_points - 2) // 3):
        finite = section[np.isfinite(values[section])]
        if finite.size:
            keep |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
        if finite.size < section.size:
            keep.add(int(section[~np.isfinite(values[section])][0]))
    return np.array(sorted(keep))


def axis_limits(values: NDArray[np.float64], y_floor: float = math.inf) -> tuple[float, float]:
    """Return the limits of the y axis. A few outliers (an exploding loss) do not flatten the other values."""
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = (float(x) for x in np.percentile(values, (2, 98)))
    if high - low > 10 * (inner_high - inner_low) > 0:
        low, high = max(low, 2 * inner_low - inner_high), min(high, 2 * inner_high - inner_low)
    low = min(low, y_floor)
    margin = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return (low if low == y_floor else low - margin), high + margin


def nice_ticks(low: float, high: float, max_intervals: int) -> list[float]:
    """Return the multiples of a step in [low, high]; the step is 1, 2, 2.5 or 5 times a power of ten."""
    smallest = (high - low) / max_intervals
    scale = 10.0 ** math.floor(math.log10(smallest))
    step = next(factor * scale for factor in (1, 2, 2.5, 5, 10) if factor * scale >= smallest * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _render_svg(
    title: str, lines: Sequence[Line], y_limits: tuple[float, float], marks_kimg: Sequence[float]
) -> Markup:
    kimg = np.concatenate([np.asarray(line.kimg, float) for line in lines])
    low, high = float(kimg.min()), float(kimg.max())
    margin = 0.02 * (high - low) or 0.1 * abs(high) or 1.0
    area = _PlotArea((low - margin, high + margin), y_limits)
    max_points = MAX_POINTS * 3 // max(3, len(lines))
    clip_id = f"clip-{zlib.crc32(title.encode()):08x}"  # differs between the charts of a page
    elements = [*area.draw_axes(), _begin_clip(clip_id)]
    elements += [area.draw_mark(mark) for mark in marks_kimg]
    elements += [area.draw_line(line, max_points) for line in lines]
    label = escape(f"{title}: {', '.join(line.name for line in lines)} over kimg")
    box = f"0 0 {WIDTH} {HEIGHT}"
    return Markup(f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(elements)}</g></svg>')


@dataclass(frozen=True)
class _PlotArea:
    """Maps values to pixels, and draws. Coordinates are those of the whole chart."""

    x_limits: tuple[float, float]
    y_limits: tuple[float, float]

    def x(self, kimg: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return the pixels from the left."""
        low, high = self.x_limits
        return LEFT + (np.asarray(kimg) - low) / (high - low) * (RIGHT - LEFT)

    def y(self, values: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Return the pixels from the top. Values far beyond the axis, up to 1e29 times its length, are moved nearer."""
        low, high = self.y_limits
        return np.clip(BOTTOM - (np.asarray(values) - low) / (high - low) * (BOTTOM - TOP), -1e4, 1e4)

    def draw_axes(self) -> Iterator[str]:
        """Yield the ticks of both axes, the lines across, and the line below."""
        x_ticks = nice_ticks(*self.x_limits, 6)
        y_ticks = nice_ticks(*self.y_limits, 5)
        lines = "".join(f"M{LEFT} {self.y(tick):.5g}H{RIGHT}" for tick in y_ticks)
        yield f'<path d="{lines}" stroke="var(--rule)" stroke-width=".6"/>'
        yield f'<path d="M{LEFT} {BOTTOM}H{RIGHT}" stroke="var(--rule)" stroke-width=".8"/>'
        yield '<g fill="var(--ink-soft)" font-size="10">'
        for tick in x_ticks:
            yield f'<text x="{self.x(tick):.5g}" y="{BOTTOM + 14}" text-anchor="middle">{_format_tick(tick)}</text>'
        for tick in y_ticks:
            yield f'<text x="{LEFT - 5}" y="{self.y(tick) + 3.5:.5g}" text-anchor="end">{_format_tick(tick)}</text>'
        yield "</g>"

    def draw_mark(self, kimg: float) -> str:
        """Draw a vertical line."""
        return f'<path d="M{self.x(kimg):.5g} {TOP}V{BOTTOM}" stroke="var(--alarm)" stroke-dasharray="2 2"/>'

    def draw_line(self, line: Line, max_points: int) -> str:
        """Draw a line, with gaps at values that cannot be drawn, and with dots if there are few values."""
        values = np.where(_is_drawable(line.values), np.asarray(line.values, float), np.nan)
        indices = downsample_indices(values, max_points)
        pixels = np.stack([self.x(np.asarray(line.kimg, float)[indices]), self.y(values[indices])], axis=1)
        starts = np.isfinite(values[indices]) & ~np.isfinite(np.r_[np.nan, values[indices][:-1]])
        has_dots = np.isfinite(values).sum() <= MAX_DOTS
        path, dots = "", ""
        for (x, y), is_start in zip(pixels, starts):
            if np.isfinite(y):
                dots += f"M{x:.5g} {y:.5g}h0"
                path += f"M{x:.5g} {y:.5g}h0" if is_start else f"L{x:.5g} {y:.5g}"
        style = f'stroke="var(--{line.colour})" stroke-linejoin="round" stroke-linecap="round"'
        dashes = ' stroke-dasharray="5 2.5"' if line.dashed else ""
        drawn = f'<path d="{path}" {style} stroke-width="{1.4 if has_dots else 1.1}"{dashes}/>'
        return drawn + (f'<path d="{dots}" {style} stroke-width="4"/>' if has_dots else "")


def _begin_clip(clip_id: str) -> str:
    """Begin a group of which only what is within the axes is shown."""
    area = f'<rect x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"/>'
    return f'<clipPath id="{clip_id}">{area}</clipPath><g clip-path="url(#{clip_id})" fill="none">'


def _is_drawable(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.abs(np.asarray(values, float)) < 1e30  # False for nan; larger values overflow while drawing


def _format_tick(value: float) -> str:
    if abs(value) >= 1e6:
        text = f"{value / 1e6:,.6g} M"
    elif 0 < abs(value) < 1e-4:
        text = f"{value:.1e}"
    else:
        text = f"{value:,.8g}"
    return text.replace("-", number_format.MINUS)
