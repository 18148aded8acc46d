"""The charts of a page about one run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paragan.report import number_format
from paragan.report.run_data import StatsColumns
from paragan.report.scores import ScoreSeries
from paragan.report.svg_plot import Chart, Line, make_chart
from paragan.report.usage import AGE_KEY, mean_ages

MAX_EXTRA_CHARTS = 12  # of keys that CHARTS does not name

CHARTS = (  # title, unit, y_floor of make_chart, ((name of the line, key, colour), ...)
    ("Losses", "", math.inf, (("G", "Loss/G/loss", "g"), ("D", "Loss/D/loss", "d"))),
    ("D's scores", "", math.inf, (("real", "Loss/scores/real", "real"), ("fake", "Loss/scores/fake", "g"))),
    ("Throughput", "images/s", 0, (("images/s", "Timing/img_per_sec", "other"),)),
    (
        "Data: latency per image",
        "ms",
        0,
        (
            ("median", "Data/fetch_ms", "g"),
            ("90th percentile", "Data/fetch_p90_ms", "d"),
            ("without congestion", "Data/baseline_ms", "real"),
        ),
    ),
    ("Data: batches ahead", "batches", 0, (("requested", "Data/batches_ahead", "g"), ("ready", "Data/ready", "real"))),
    (
        "Data: threads",
        "threads",
        0,
        (("decoding", "Data/workers", "g"), ("concurrent requests", "Data/concurrent_requests", "d")),
    ),
    ("Bytes sent", "bytes", 0, (("G", "Comm/G/sent_bytes", "g"), ("D", "Comm/D/sent_bytes", "d"))),
    (
        "Consensus: distance of ranks from their mean",
        "relative",
        0,
        (("G", "Consensus/G", "g"), ("D", "Consensus/D", "d")),
    ),
    ("Peak memory", "GB", 0, (("peak memory", "Resources/peak_mem_gb", "other"),)),
)
LINE_COLOURS = ("g", "d", "real", "other")
PLOTTED_ELSEWHERE = {"Progress/kimg", "Progress/step", "Timing/total_s", "Timing/sec_per_kimg", "Timing/eval_s"}


def score_charts(score_series: Sequence[ScoreSeries], marks_kimg: Sequence[float] = ()) -> Iterator[Chart]:
    """Yield a chart for each score with more than one value, with a line for each protocol (four at most)."""
    by_name: dict[str, list[ScoreSeries]] = {}
    for series in score_series:
        by_name.setdefault(series.name, []).append(series)
    for name, members in list(by_name.items())[:MAX_EXTRA_CHARTS]:
        lines = [
            Line(
                series.protocol.label,
                [score.kimg for score in series.scores],
                [score.value for score in series.scores],
                colour,
            )
            for series, colour in zip(members, LINE_COLOURS)
        ]
        chart = make_chart(name, describe_direction(members[0]), lines, marks_kimg=marks_kimg)
        if chart and any(len(line.values) > 1 for line in lines):
            yield chart


def describe_direction(score_series: ScoreSeries) -> str:
    """Return "lower is better", "higher is better", or "" for an unknown score."""
    return f"{score_series.direction} is better" if score_series.direction else ""


def standard_charts(stats: StatsColumns, marks_kimg: Sequence[float] = ()) -> Iterator[Chart]:
    """Yield the charts of CHARTS that the run has numbers for, and one of staleness."""
    for title, unit, y_floor, series in CHARTS:
        lines = [Line(name, *stats.column(key), colour) for name, key, colour in series]
        if unit == "bytes":
            unit, lines = scale_to_byte_unit([line for line in lines if any(line.values)])
        if chart := make_chart(title, unit, [line for line in lines if line.values], y_floor, marks_kimg):
            yield chart
    lines = [Line(name, *column, colour) for (name, column), colour in zip(mean_ages(stats).items(), LINE_COLOURS)]
    if chart := make_chart("Staleness: mean age", "rounds", lines, 0, marks_kimg):
        yield chart


def scale_to_byte_unit(lines: Sequence[Line]) -> tuple[str, list[Line]]:
    """Scale lines in bytes per tick to a unit that suits the largest value. Returns the unit and the lines."""
    largest = max((value for line in lines for value in line.values if math.isfinite(value)), default=0)
    unit, size = next((unit, size) for unit, size in number_format.BYTE_UNITS if largest >= size or size == 1)
    return f"{unit} per tick", [replace(line, values=[value / size for value in line.values]) for line in lines]


def extra_charts(stats: StatsColumns) -> list[Chart]:
    """Return charts of the other keys whose value changes."""
    shown = PLOTTED_ELSEWHERE | {key for *_, series in CHARTS for _, key, _ in series}
    keys = (key for key in stats.keys if key not in shown and not AGE_KEY.fullmatch(key))
    lines = [Line(key, *stats.column(key), "other") for key in keys]
    changing = [line for line in lines if len(set(line.values)) > 1][:MAX_EXTRA_CHARTS]
    charts = (make_chart(line.name[: number_format.MAX_VALUE_CHARS], "", [line]) for line in changing)
    return [chart for chart in charts if chart]
