"""The plots of docs/measurements/ from benchmarks/results/: `python -m benchmarks.plots`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

RESULTS, DOCS = Path(__file__).parent / "results", Path(__file__).parent.parent / "docs/figures"
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "paragan",
    "svg.fonttype": "none",
    "legend.frameon": False,
}
OURS_COLOR, THEIRS_COLOR, LIMIT_COLOR, SPREAD_COLOR = "#2a6f97", "#a9b4bd", "#c1121f", "#d9e2e8"
BUFFER_CASES = ("alternating", "0, 0", "0, 0, replay", "0, 0, replay a half", "0, 0, uniform")
METRIC_LABELS = {"fd": "Fréchet distance", "recognised": "recognised", "diversity": "diversity"}


def plot_speed(laboratories: dict[str, Any]) -> Figure:
    """How much faster than float32 a step is, and could be by its bytes."""
    paragan_result, torch = laboratories["200 Mbit/s"]["rows"], laboratories["200 Mbit/s, torch"]["rows"]
    exact = paragan_result[0]
    bars = [(f"{r['strategy']}, {r['wire']}", r["step_ms"], r["sent_bytes"], OURS_COLOR) for r in paragan_result[1:]]
    bars += [
        (r["strategy"].replace("ddp", "torch DDP").replace("+", ", "), r["step_ms"], 0, THEIRS_COLOR) for r in torch
    ]
    figure = Figure(figsize=(7, 0.3 * len(bars) + 0.9), layout="constrained")
    axes = figure.add_subplot()
    _plot_speedup_bars(axes, exact, bars)
    axes.set_xlabel("times faster than float32, 4 hosts at 200 Mbit/s, 8M parameters")
    axes.legend(loc="lower right")
    return figure


def _plot_speedup_bars(axes: Axes, exact: dict[str, Any], bars: list[tuple[str, float, int, str]]) -> None:
    """A bar for each (name, ms, bytes or 0, colour): how much faster than `exact`, and how much its bytes allow."""
    for i, (_, ms, sent, colour) in enumerate(bars):
        faster = exact["step_ms"] / ms
        axes.barh(i, faster, 0.7, color=colour)
        axes.text(faster, i, f"{faster:.3g} ", va="center", ha="right", color="white")
        if sent:
            limit = exact["sent_bytes"] / sent
            axes.plot(
                [limit, limit], [i - 0.4, i + 0.4], color=LIMIT_COLOR, lw=2, label=None if i else "limit by bytes"
            )
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 2, 4, 8, 16, 32, 64], ["1", "2", "4", "8", "16", "32", "64"])


def plot_gossip_speed(laboratories: dict[str, Any]) -> Figure:
    """Gossip beside CP-OAdam, which sums all gradients: many bytes, many hops, and one slow link."""
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    grid: Any = figure.subplots(1, 3)
    for axes, lab, title, counted in (
        (grid[0], "100 Mbit/s", "100 Mbit/s, 8M parameters", True),
        (grid[1], "200 Mbit/s, 20 ms, 100k parameters", "20 ms one way, 100k parameters", False),
    ):
        _, exact, *rows = laboratories[lab]["rows"]
        bars = [(f"gossip, {r['wire']}", r["step_ms"], r["sent_bytes"] if counted else 0, OURS_COLOR) for r in rows]
        _plot_speedup_bars(axes, exact, bars)
        axes.set_xlim(1, 20)
        axes.set_xlabel("times faster than CP-OAdam")
        axes.set_title(title, fontsize=8, loc="left")
    grid[0].legend(loc="upper right", fontsize=7)
    even, uneven = (
        laboratories[lab]["rows"]
        for lab in ("100 Mbit/s, computing 0.5 s, 500k parameters", "one link of 10 Mbit/s, the same")
    )
    stored = [a["step_ms"] / b["step_ms"] for a, b in zip(even, uneven)]
    for i, share in enumerate(stored):
        grid[2].barh(i, 100 * share, 0.7, color=OURS_COLOR if i > 1 else THEIRS_COLOR)
        grid[2].text(100 * share, i, f"{share:.0%} ", va="center", ha="right", color="white")
    grid[2].set_yticks(range(len(stored)), [row["strategy"] for row in even])
    grid[2].invert_yaxis()
    grid[2].set_xlabel("pace kept, %")
    grid[2].set_title("one of eight links ten times slower", fontsize=8, loc="left")
    return figure


def select_cases(result: dict[str, Any], cases: Sequence[str]) -> dict[str, Any]:
    """Of what was found, these cases."""
    rows = [row for row in result["rows"] if row["case"] in cases]
    return {**result, "rows": rows, "cases": {case: result["cases"][case] for case in cases}}


def plot_quality(result: list[dict[str, Any]]) -> Figure:
    """Every seed of every case as a dot, the first case's spread as a band."""
    cases = dict.fromkeys(case for one in result for case in one["cases"])
    figure = Figure(figsize=(9, 2.1 * len(result)), layout="constrained")
    grid: Any = figure.subplots(len(result), len(METRIC_LABELS), squeeze=False, sharey=False)
    for row, one in zip(grid, result):
        local = [case for case in cases if case in one["cases"]]
        for axes, (name, label) in zip(row, METRIC_LABELS.items()):
            _plot_dots(axes, one["rows"], local, name)
            axes.set_title(f"{one['recipe']}, {one['ranks']} ranks: {label}", fontsize=8, loc="left")
        for axes in row[1:]:
            axes.set_yticklabels([])
    return figure


def _plot_dots(axes: Axes, rows: list[dict[str, Any]], cases: list[str], name: str) -> None:
    first = [row[name] for row in rows if row["case"] == cases[0]]
    axes.axvspan(min(first), max(first), color=SPREAD_COLOR)
    for i, case in enumerate(cases):
        values = [row[name] for row in rows if row["case"] == case]
        axes.plot(values, [i] * len(values), "o", ms=4, color=OURS_COLOR, alpha=0.8, clip_on=False)
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.5, -0.5)


def plot_lags(result: dict[str, Any]) -> Figure:
    """Quality by how old what D or G saw was, and by how old both were together."""
    figure = Figure(figsize=(9, 2.8), layout="constrained")
    grid: Any = figure.subplots(1, 2, sharey=True)
    fd = {row["case"]: row["fd"] for row in reversed(result["rows"])}  # the first seed
    band = [row["fd"] for row in result["rows"] if row["case"] == "alternating"]
    points: dict[tuple[int, int, bool], float] = {}
    for case, value in fd.items():
        ages = re.fullmatch(r"(\d+), (\d+)(, plain)?", case)
        if ages:
            points[int(ages[1]), int(ages[2]), not ages[3]] = value
    for prefetched, colour, expected in ((False, THEIRS_COLOR, "plain"), (True, OURS_COLOR, "looking ahead by 2")):
        for who, mark, whose in ((0, "o", "D's images"), (1, "^", "G's critic")):
            line = sorted((p[who], v) for p, v in points.items() if p[2] == prefetched and p[1 - who] == 0)
            grid[0].plot(*zip(*line), mark + "-", ms=4, color=colour, label=f"{whose}, {expected}")
    grid[0].set_xlabel("rounds old, the other 0")
    grid[0].set_ylabel(METRIC_LABELS["fd"])
    for (fakes, critic, prefetched), value in points.items():
        mark = "s" if fakes and critic else "o" if fakes or not critic else "^"
        grid[1].plot(fakes + critic, value, mark, ms=5, color=OURS_COLOR if prefetched else THEIRS_COLOR, alpha=0.8)
    grid[1].set_xlabel("rounds old, both together; squares: both are")
    for axes in grid:
        axes.axhspan(min(band), max(band), color=SPREAD_COLOR)
        axes.set_yscale("log")
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks([0, 1, 2, 4, 8, 16], ["0", "1", "2", "4", "8", "16"])
    grid[0].legend(fontsize=7)
    return figure


CURVE_COLORS = (OURS_COLOR, LIMIT_COLOR, "#e9a820", "#5b8c5a")
BATCH_OF_D = {"1:1": 128, "2:1": 64}  # by the ratio that a case of the suite "batches" ends with


def plot_batch_curves(results: Sequence[dict[str, Any]]) -> Figure:
    """The Fréchet distance against D's real images and against rounds, by the ratio of the batches."""
    figure = Figure(figsize=(9, 2.8 * len(results)), layout="constrained")
    grid: Any = figure.subplots(len(results), 2, squeeze=False, sharey="row")
    for row, result in zip(grid, results):
        _plot_curves(row[0], result, lambda case: 1.0)
        _plot_curves(row[1], result, lambda case: 1000 / BATCH_OF_D[case[-3:]])
        row[0].set_xlabel("thousand real images shown to D")
        row[1].set_xlabel("rounds")
        row[0].set_title(result["recipe"], fontsize=8, loc="left")
        row[0].set_ylabel(METRIC_LABELS["fd"])
    grid[0][0].legend(fontsize=7)
    return figure


def plot_optimizer_curves(result: dict[str, Any]) -> Figure:
    """The Fréchet distance against D's real images, by the optimizers of G and D."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    _plot_curves(axes, result, lambda case: 1.0)
    axes.set(xlabel="thousand real images shown to D", ylabel=METRIC_LABELS["fd"])
    axes.set_title(f"{result['recipe']}, optimizers of G, D", fontsize=8, loc="left")
    axes.legend(fontsize=7)
    return figure


def _plot_curves(axes: Axes, result: dict[str, Any], scale: Callable[[str], float]) -> None:
    """Plot every seed's curve of every case; `scale` is what a thousand images of a case are on the axis."""
    for case, colour in zip(result["cases"], CURVE_COLORS):
        for i, row in enumerate(r for r in result["rows"] if r["case"] == case):
            x, fd = zip(*((kimg * scale(case), fd) for kimg, fd in row["curve"]))
            axes.plot(x, fd, color=colour, lw=1, alpha=0.8, label=None if i else case)
    axes.set_yscale("log")


def plot_clock(rows: Sequence[dict[str, Any]]) -> Figure:
    """The Fréchet distance against seconds and against bytes, on every link; every seed is a line."""
    settings = list(dict.fromkeys((row["game"], row["hosts"], row["link"], row["pace_ms"]) for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    colors = matplotlib.colormaps["tab20"].colors  # pyright: ignore[reportAttributeAccessIssue]
    figure = Figure(figsize=(9, 0.3 * len(ways) / 3 + 2.6 * len(settings) + 0.4), layout="constrained")
    grid: Any = figure.subplots(len(settings), 2, squeeze=False, sharey="row")
    for line, (game, hosts, link, pace_ms) in zip(grid, settings):
        for row in rows:
            if (row["game"], row["hosts"], row["link"], row["pace_ms"]) == (game, hosts, link, pace_ms):
                _, fd, seconds, sent_bytes, _ = zip(*row["curve"])
                color = colors[ways.index(row["way"]) % len(colors)]
                style = {"lw": 1, "color": color, "ls": "-" if row["valid"] else ":"}
                line[0].plot(seconds, fd, **style)
                line[1].plot([max(sent, 1) / 1e6 for sent in sent_bytes], fd, **style)
        for axes in line:
            axes.set(xscale="log", yscale="log")
        line[0].set_title(f"{game}, {hosts} hosts, {link}", fontsize=8, loc="left")
        line[0].set(xlabel=f"s, on emulated devices: {pace_ms:g} ms a round of sync", ylabel=METRIC_LABELS["fd"])
        line[1].set_xlabel("MB sent by the busiest host")
    handles = [Line2D([], [], color=colors[i % len(colors)], label=way) for i, way in enumerate(ways)]
    if not all(row["valid"] for row in rows):
        handles.append(Line2D([], [], color="black", ls=":", label="invalid: the machine was too slow"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7)
    return figure


def plot_prediction(rows: Sequence[dict[str, Any]]) -> Figure:
    """Predicted against measured, and how far off."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    grid: Any = figure.subplots(1, 2, width_ratios=(2, 1))
    axes, adjacent = grid
    kinds = {"sync": "o", "gossip": "^", "async": "s", "async-gossip": "D", "quantized": "v"}
    for kind, mark in kinds.items():
        some = [row for row in rows if row["strategy"].split("+")[0] == kind]
        if some:
            points = zip(*((row["measured_ms"], row["predicted_ms"]) for row in some))
            axes.plot(*points, mark, ms=4, label=kind, alpha=0.8)
    times = [row["measured_ms"] for row in rows]
    ends = [0.8 * min(times), 1.25 * max(times)]
    axes.fill_between(
        ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=SPREAD_COLOR, label="within 10 %"
    )
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="ms a step, measured", ylabel="predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=7)
    errors = sorted(100 * abs(row["error"]) for row in rows)
    adjacent.plot(errors, [100 * (i + 1) / len(errors) for i in range(len(errors))], color=OURS_COLOR)
    adjacent.axvline(10, color=LIMIT_COLOR, lw=1)
    adjacent.set(xlabel="error, %", ylabel="of the configurations, %", xlim=(0, None), ylim=(0, 100))
    return figure


def save_plot(draw: Callable[[], Figure], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        draw().savefig(path, dpi=150)


def main() -> None:
    DOCS.mkdir(exist_ok=True)

    def read(name: str) -> dict[str, Any]:
        return json.loads((RESULTS / f"{name}.json").read_text())

    with matplotlib.rc_context(STYLE):
        quantized = [read(f"quality_{name}") for name in ("digits_sync", "fashion_sync")]
        decentralized = ("digits_gossip4", "digits_gossip8", "fashion_gossip4", "fashion_gossip8")
        for name, figure in (
            ("quantized_speed", plot_speed(read("lab")["laboratories"])),
            ("quantized_quality", plot_quality(quantized)),
            ("gossip_speed", plot_gossip_speed(read("gossip_lab")["laboratories"])),
            ("async_lags", plot_lags(read("quality_digits_lags"))),
            ("async_quality", plot_quality([read("quality_digits_async"), read("quality_fashion_async")])),
            (
                "async_choices",
                plot_quality([select_cases(read("quality_digits_lags"), BUFFER_CASES), read("quality_digits_split")]),
            ),
            ("gossip_quality", plot_quality([read(f"quality_{name}") for name in decentralized])),
            ("batch_curves", plot_batch_curves([read(f"quality_{name}_batches") for name in ("digits", "fashion")])),
            ("optimizer_curves", plot_optimizer_curves(read("quality_fashion_optimizers"))),
        ):
            figure.savefig(DOCS / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
