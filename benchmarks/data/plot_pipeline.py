"""The plot of docs/measurements/data.md: two loaders during the same bursts of congestion."""

from __future__ import annotations

import itertools
import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plots import LIMIT_COLOR, OURS_COLOR, SPREAD_COLOR

CONTESTANT_LABELS = {"ours": "ours", "dataloader": "torch's DataLoader (2 workers, prefetch 2)"}
FETCHES_COLOR = "#e09f3e"  # beside OURS: told apart by the colour-blind, and in grey


def plot_pipeline(result: dict[str, Any]) -> Figure:
    """A column a contestant; time runs to the right; bursts are shaded."""
    picture = Figure(figsize=(9, 6.2), layout="constrained")
    grid: Any = picture.subplots(4, len(CONTESTANT_LABELS), sharex=True, sharey="row", height_ratios=(3, 4, 2, 3))
    for column, (name, title) in zip(grid.T, CONTESTANT_LABELS.items()):
        one = result["contestants"][name]
        column[0].set_title(f"{title}: waits {one['rounds'][0]['share']:.1%}", fontsize=9, loc="left")
        _plot_latency(column[0], one)
        _plot_ready(column[1], one)
        _plot_workers(column[2], one)
        _plot_wait(column[3], one, result["play"]["seconds"])
        for axes in column:
            for begin, end in result["play"]["bursts"]:
                axes.axvspan(begin, min(end, result["play"]["seconds"]), color=SPREAD_COLOR, lw=0, zorder=0)
        column[3].set_xlabel("seconds; shaded: congested")
        column[3].set_xlim(0, result["play"]["seconds"])
    labels = ("latency of a\nrequest, ms", "batches ready,\nfetches under way", "workers", "waited so far, s")
    for axes, label in zip(grid[:, 0], labels):
        axes.set_ylabel(label)
    for axes in grid[1:, 0]:  # once all is drawn
        axes.set_ylim(bottom=0)
    grid[2, 0].yaxis.get_major_locator().set_params(integer=True)
    grid[1, 0].legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0, fontsize=7, ncols=2)
    return picture


def _plot_latency(axes: Axes, one: dict[str, Any]) -> None:
    _plot_series(axes, one["timeline"], "latency_ms", color=OURS_COLOR)
    axes.set_yscale("log")
    axes.set_yticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axes.minorticks_off()


def _plot_ready(axes: Axes, one: dict[str, Any]) -> None:
    _plot_series(axes, one["gauges"], "ready", color=OURS_COLOR, label="batches ready")
    _plot_series(axes, one["timeline"], "fetches", color=FETCHES_COLOR, ls="--", label="fetches under way")


def _plot_workers(axes: Axes, one: dict[str, Any]) -> None:
    _plot_series(axes, one["gauges"], "workers", color=OURS_COLOR, drawstyle="steps-post")


def _plot_wait(axes: Axes, one: dict[str, Any], seconds: float) -> None:
    """It grows by a second a second while the step waits, and not at all while it does not."""
    at = [0.0, *itertools.chain.from_iterable((b, b + w) for b, w in one["waits"]), seconds]
    grown = list(itertools.accumulate(w for _, w in one["waits"]))
    axes.plot(at, [0.0, *itertools.chain.from_iterable(zip([0.0, *grown], grown)), grown[-1]], color=LIMIT_COLOR)


def _plot_series(axes: Axes, rows: list[dict[str, Any]], name: str, **options: Any) -> None:
    """Gaps where it is not known."""
    axes.plot(
        [row["s"] for row in rows], [math.nan if row[name] is None else row[name] for row in rows], lw=1.2, **options
    )
