"""Which curves a page shows of a run."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paragan.report import number_format
from paragan.report.run_data import Stats
from paragan.report.scores import Series
from paragan.report.svg_plot import Chart, Line, chart
from paragan.report.usage import AGE, mean_ages

EXTRA = 12  # curves of keys that no chart below names

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


def score_charts(measured: Sequence[Series], marks: Sequence[float] = ()) -> Iterator[Chart]:
    """A chart a score that was taken more than once; a line a protocol."""
    by_name: dict[str, list[Series]] = {}
    for one in measured:
        by_name.setdefault(one.name, []).append(one)
    for name, several in list(by_name.items())[:EXTRA]:
        lines = [
            score_line(one, one.protocol.label, ("g", "d", "real", "other")[place])
            for place, one in enumerate(several[:4])
        ]
        made = chart(name, direction(several[0]), lines, marks=marks)
        if made and any(len(line.values) > 1 for line in lines):
            yield made


def score_line(one: Series, name: str, colour: str) -> Line:
    return Line(name, [score.kimg for score in one.scores], [score.value for score in one.scores], colour)


def direction(one: Series) -> str:
    return f"{one.better} is better" if one.better else ""


def named_charts(stats: Stats, marks: Sequence[float] = ()) -> Iterator[Chart]:
    """Those of CHARTS that the run has numbers for, and the ages of what was seen."""
    for title, unit, floor, wanted in CHARTS:
        lines = [Line(name, *stats.column(key), colour) for name, key, colour in wanted]
        if unit == "bytes":
            unit, lines = in_units_of_bytes([line for line in lines if any(line.values)])
        made = chart(title, unit, [line for line in lines if line.values], floor, marks)
        if made:
            yield made
    colours = ("g", "d", "real", "other")
    lines = [Line(name, *at, colour) for (name, at), colour in zip(mean_ages(stats).items(), colours)]
    if made := chart("Staleness: mean age of what was seen", "rounds", lines, 0, marks):
        yield made


def in_units_of_bytes(lines: Sequence[Line]) -> tuple[str, list[Line]]:
    most = max((value for line in lines for value in line.values if math.isfinite(value)), default=0)
    unit, size = next((unit, size) for unit, size in number_format.SIZES if most >= size or size == 1)
    return f"{unit} a tick", [replace(line, values=[v / size for v in line.values]) for line in lines]


def extra_charts(stats: Stats) -> list[Chart]:
    """Of keys that have no chart of their own, those whose number changes."""
    named = SHOWN_ELSEWHERE | {key for *_, wanted in CHARTS for _, key, _ in wanted}
    others = (key for key in stats.keys if key not in named and not AGE.fullmatch(key))
    lines = [Line(key, *stats.column(key), "other") for key in others]
    moving = [line for line in lines if len(set(line.values)) > 1][:EXTRA]
    return [made for line in moving if (made := chart(line.name[: number_format.LONGEST], "", [line]))]
