"""Curves over kimg as inline SVG that takes its colours and font from the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from paragan.report import number_format

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_POINTS = 500  # of a line
CSS_COLOURS = {  # colour that matplotlib draws with -> CSS variable of the page (light, dark and print)
    "#000001": "ink-soft",
    "#000002": "rule",
    "#000003": "g",
    "#000004": "d",
    "#000005": "real",
    "#000006": "other",
    "#000007": "alarm",
    **{f"#00001{i:x}": f"r{i + 1}" for i in range(8)},  # runs of a comparison
}
_PLACEHOLDER_COLOURS = {name: colour for colour, name in CSS_COLOURS.items()}


@dataclass(frozen=True)
class Line:
    """A line of a chart."""

    name: str
    kimg: Sequence[float]
    values: Sequence[float]
    colour: str  # a value of CSS_COLOURS
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


def _render_svg(
    title: str, lines: Sequence[Line], y_limits: tuple[float, float], marks_kimg: Sequence[float]
) -> Markup:
    import matplotlib  # importing it takes half a second, which training need not wait for
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    ink, rule = _PLACEHOLDER_COLOURS["ink-soft"], _PLACEHOLDER_COLOURS["rule"]
    salt = title  # ids differ between the charts of a page, but not from one rendering to the next
    with matplotlib.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": salt,
            "font.size": 10,
            "axes.edgecolor": rule,
            "xtick.color": ink,
            "ytick.color": ink,
        }
    ):
        figure = Figure(figsize=(5, 2.4), dpi=72, frameon=False)  # 360 x 173: a phone's width, text unscaled
        axes = figure.add_axes((0.13, 0.15, 0.86, 0.82))
        for mark in marks_kimg:
            axes.axvline(mark, color=_PLACEHOLDER_COLOURS["alarm"], linewidth=1, linestyle=(0, (2, 2)))
        for line in lines:
            _plot_line(axes, line, MAX_POINTS * 3 // max(3, len(lines)))
        axes.set_ylim(y_limits)
        _style_axes(axes)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text)
    label = f"{title}: {', '.join(line.name for line in lines)} over kimg"
    return _inline_svg(text.getvalue(), label)


def _is_drawable(values: Sequence[float] | NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.abs(np.asarray(values, float)) < 1e30  # False for nan; larger values overflow while drawing


def _plot_line(axes: Axes, line: Line, max_points: int) -> None:
    kimg = np.asarray(line.kimg, float)
    values = np.asarray(line.values, float)
    values = np.where(_is_drawable(values), values, np.nan)
    indices = downsample_indices(values, max_points)
    has_markers = np.isfinite(values).sum() <= 40
    axes.plot(
        kimg[indices],
        values[indices],
        color=_PLACEHOLDER_COLOURS[line.colour],
        linestyle="--" if line.dashed else "-",
        linewidth=1.4 if has_markers else 1.1,
        marker="o" if has_markers else None,
        markersize=3,
    )


def _style_axes(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.patch.set_visible(False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="y", color=_PLACEHOLDER_COLOURS["rule"], linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, pad=5)
    axes.margins(x=0.02)
    for axis, ticks in ((axes.xaxis, 6), (axes.yaxis, 5)):
        axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(_format_tick))


def _format_tick(value: float, _: int | None) -> str:
    if abs(value) >= 1e6:
        text = f"{value / 1e6:,.6g} M"
    elif 0 < abs(value) < 1e-4:
        text = f"{value:.1e}"
    else:
        text = f"{value:,.8g}"
    return text.replace("-", number_format.MINUS)


def _inline_svg(svg: str, label: str) -> Markup:
    """Make matplotlib's SVG file an element of a page: without prologue, metadata, fonts and colours.

    The only text from the run is `label`, which is escaped; the page writes titles and legends itself.
    """
    body = svg[svg.index("</defs>") + len("</defs>") :]
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
    body = re.sub(
        r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", body
    )  # keep the ids of markers and clips, which are referenced
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    body = re.sub(r"font: [^;\"]*;?|font-family: [^;\"]*;?", "", body)
    body = re.sub(r"\s*\n\s*", " ", body).replace("xlink:href", "href")
    for colour, name in CSS_COLOURS.items():
        body = body.replace(colour, f"var(--{name})")
    return Markup(f'<svg viewBox="{box[1]}" role="img" aria-label="{escape(label)}">{body}')
