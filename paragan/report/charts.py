"""Which curves a page shows of a run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paragan.report import number_format
from paragan.report.run_data import StatsColumns
from paragan.report.scores import ScoreSeries
from paragan.report.svg_plot import Chart, Line, make_chart
from paragan.report.usage import AGE_KEY, mean_ages

MAX_EXTRA_CHARTS = 12  # curves of keys that no chart below names

CHARTS = (  # title, unit, where the axis begins at the latest, (name of the line, key, colour)
    ("Losses", "", math.inf, (("G", "Loss/G/loss", "g"), ("D", "Loss/D/loss", "d"))),
    ("D's scores", "", math.inf, (("real", "Loss/scores/real", "real"), ("fake", "Loss/scores/fake", "g"))),
    ("Throughput", "images/s", 0, (("images/s", "Timing/img_per_sec", "other"),)),
    (
        "Data: latency of an image",
        "ms",
        0,
        (
            ("median", "Data/fetch_ms", "g"),
            ("90 of 100", "Data/fetch_high_ms", "d"),
            ("without congestion", "Data/quiet_ms", "real"),
        ),
    ),
    ("Data: batches ahead", "batches", 0, (("asked for", "Data/depth", "g"), ("ready", "Data/ready", "real"))),
    (
        "Data: hands",
        "threads",
        0,
        (("that decode", "Data/workers", "g"), ("requests at once", "Data/fetches", "d")),
    ),
    ("Bytes sent", "bytes", 0, (("G", "Comm/G/sent_bytes", "g"), ("D", "Comm/D/sent_bytes", "d"))),
    (
        "Consensus: distance of ranks from their mean",
        "of its norm",
        0,
        (("G", "Consensus/G", "g"), ("D", "Consensus/D", "d")),
    ),
    ("Peak memory", "GB", 0, (("peak memory", "Resources/peak_mem_gb", "other"),)),
)
SHOWN_ELSEWHERE = {"Progress/kimg", "Progress/step", "Timing/total_s", "Timing/sec_per_kimg", "Timing/eval_s"}


def score_charts(score_series: Sequence[ScoreSeries], marks_kimg: Sequence[float] = ()) -> Iterator[Chart]:
    """A chart a score that was taken more than once; a line a protocol."""
    by_name: dict[str, list[ScoreSeries]] = {}
    for one in score_series:
        by_name.setdefault(one.name, []).append(one)
    for name, several in list(by_name.items())[:MAX_EXTRA_CHARTS]:
        lines = [
            make_score_line(one, one.protocol.label, ("g", "d", "real", "other")[place])
            for place, one in enumerate(several[:4])
        ]
        made = make_chart(name, describe_direction(several[0]), lines, marks_kimg=marks_kimg)
        if made and any(len(line.values) > 1 for line in lines):
            yield made


def make_score_line(score_series: ScoreSeries, name: str, colour: str) -> Line:
    return Line(
        name, [score.kimg for score in score_series.scores], [score.value for score in score_series.scores], colour
    )


def describe_direction(score_series: ScoreSeries) -> str:
    return f"{score_series.direction} is better" if score_series.direction else ""


def standard_charts(stats: StatsColumns, marks_kimg: Sequence[float] = ()) -> Iterator[Chart]:
    """Those of CHARTS that the run has numbers for, and the ages of what was seen."""
    for title, unit, floor, wanted in CHARTS:
        lines = [Line(name, *stats.column(key), colour) for name, key, colour in wanted]
        if unit == "bytes":
            unit, lines = scale_to_byte_unit([line for line in lines if any(line.values)])
        made = make_chart(title, unit, [line for line in lines if line.values], floor, marks_kimg)
        if made:
            yield made
    colours = ("g", "d", "real", "other")
    lines = [Line(name, *at, colour) for (name, at), colour in zip(mean_ages(stats).items(), colours)]
    if made := make_chart("Staleness: mean age of what was seen", "rounds", lines, 0, marks_kimg):
        yield made


def scale_to_byte_unit(lines: Sequence[Line]) -> tuple[str, list[Line]]:
    most = max((value for line in lines for value in line.values if math.isfinite(value)), default=0)
    unit, size = next((unit, size) for unit, size in number_format.BYTE_UNITS if most >= size or size == 1)
    return f"{unit} a tick", [replace(line, values=[v / size for v in line.values]) for line in lines]


def extra_charts(stats: StatsColumns) -> list[Chart]:
    """Of keys that have no chart of their own, those whose number changes."""
    named = SHOWN_ELSEWHERE | {key for *_, wanted in CHARTS for _, key, _ in wanted}
    others = (key for key in stats.keys if key not in named and not AGE_KEY.fullmatch(key))
    lines = [Line(key, *stats.column(key), "other") for key in others]
    moving = [line for line in lines if len(set(line.values)) > 1][:MAX_EXTRA_CHARTS]
    return [made for line in moving if (made := make_chart(line.name[: number_format.MAX_VALUE_CHARS], "", [line]))]
