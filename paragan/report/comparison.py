"""One HTML page about several runs: curves over each other, scores, grids and settings side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.report import number_format
from paragan.report.charts import describe_direction, scale_to_byte_unit
from paragan.report.embedded_images import EmbeddedImage, embed_image, latest_grid
from paragan.report.page import MAX_COLUMNS, MAX_PAGE_BYTES, MAX_ROWS, render_page, summarize_run
from paragan.report.run_data import RunData, read_run_data
from paragan.report.scores import RecordedProtocol, ScoreSeries, group_scores, unique_protocols
from paragan.report.svg_plot import Chart, Line, make_chart
from paragan.report.usage import BreakdownItem, time_breakdown

MAX_CELLS, MAX_PROTOCOL_ENTRIES = 800, 60  # of a table, and of what a protocol says, at most
MAX_RUNS = 16  # runs: eight colours, then eight dashed
NO_FLOOR = float("inf")
CHARTS = (  # title, unit, where the axis begins at the latest, key
    ("Loss of G", "", NO_FLOOR, "Loss/G/loss"),
    ("Loss of D", "", NO_FLOOR, "Loss/D/loss"),
    ("D's score of reals", "", NO_FLOOR, "Loss/scores/real"),
    ("D's score of fakes", "", NO_FLOOR, "Loss/scores/fake"),
    ("Throughput", "images/s", 0, "Timing/img_per_sec"),
    ("Bytes sent for G", "bytes", 0, "Comm/G/sent_bytes"),
    ("Bytes sent for D", "bytes", 0, "Comm/D/sent_bytes"),
    ("Consensus of G", "of its norm", 0, "Consensus/G"),
    ("Consensus of D", "of its norm", 0, "Consensus/D"),
    ("Peak memory", "GB", 0, "Resources/peak_mem_gb"),
)


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs."""

    name: str
    colour: str
    dashed: bool
    run_data: RunData
    summary: Mapping[str, Any]
    series: Sequence[ScoreSeries]
    time_breakdown: Sequence[BreakdownItem]
    sample_grid: tuple[int, EmbeddedImage] | None

    def series_named(self, name: str) -> list[ScoreSeries]:
        """Its scores of a name, under every protocol; the one that was used last comes first."""
        return sorted((one for one in self.series if one.name == name), key=lambda one: not one.is_current)

    def make_line(self, kimg: Sequence[float], values: Sequence[float]) -> Line:
        return Line(self.name, kimg, values, self.colour, self.dashed)


@dataclass(frozen=True)
class ScoreRow:
    """The last scores of one name. best: place of the best, where all may be compared."""

    name: str
    direction: str
    cells: tuple[ScoreSeries | None, ...]
    best_column: int | None
    warnings: tuple[str, ...]


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a page about several runs and return its path. Unusable is a folder that holds no run, the same folder
    twice, and more runs than there are colours."""
    names = _distinct_names(run_dirs)
    folders = [read_run_data(Path(path)) for path in run_dirs]
    known: dict[str, RecordedProtocol] = {}
    measured = [group_scores(folder.scores, known)[:MAX_ROWS] for folder in folders]
    room = (MAX_PAGE_BYTES * 2 // 3) // (len(folders) + 1)
    sides = [
        ComparedRun(
            name,
            f"r{place % 8 + 1}",
            place >= 8,
            folder,
            summarize_run(folder),
            scores,
            time_breakdown(folder.stats),
            latest_grid(folder.path, room),
        )
        for place, (name, folder, scores) in enumerate(zip(names, folders, measured))
    ]
    used = unique_protocols([one for scores in measured for one in scores])[-MAX_COLUMNS:]
    rows = [*_score_rows(sides)][: MAX_CELLS // len(sides)]
    facts = {
        "sides": sides,
        "rows": rows,
        "unlike": _kimg_range(rows),
        "protocols": used,
        "protocol_names": list(dict.fromkeys(name for one in used for name in one.entries))[:MAX_PROTOCOL_ENTRIES],
        "charts": [*_score_charts(sides, rows), *_stat_charts(sides)],
        "fields": _differing_fields(sides)[: MAX_CELLS // len(sides)],
        "reals": next(
            (found for side in sides if (found := embed_image(side.run_data.path / "reals.png", room))), None
        ),
    }
    atomic_write_bytes(out, render_page("comparison.html", **facts))
    return out


def _distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """What each folder is called: as much of its path as tells it from the others."""
    if len(run_dirs) > MAX_RUNS:
        raise UsageError(f"{len(run_dirs)} RUN_DIRs are more than a page tells apart: give at most {MAX_RUNS}")
    paths = [Path(path).resolve() for path in run_dirs]
    twice = next((given for given, path in zip(run_dirs, paths) if paths.count(path) > 1), None)
    if twice:
        raise UsageError(f"RUN_DIR {twice} is given twice: give every folder once")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _score_rows(runs: Sequence[ComparedRun]) -> Iterator[ScoreRow]:
    names = dict.fromkeys(one.name for side in runs for one in side.series if one.is_current)
    for name in names:
        cells = _most_comparable([side.series_named(name) for side in runs])
        there = [(place, one) for place, one in enumerate(cells) if one]
        first, reference = there[0]
        warnings = tuple(
            f"{name} of {runs[place].name} ({one.protocol.label}) is not comparable with that of {runs[first].name} "
            f"({reference.protocol.label}): {'; '.join(differs)}."
            for place, one in there
            if (differs := _protocol_differences(one, reference))
        )
        yield ScoreRow(name, describe_direction(reference), cells, None if warnings else _best_column(there), warnings)


def _protocol_differences(one: ScoreSeries, other: ScoreSeries) -> list[str]:
    """Why they may not be compared."""
    return one.protocol.differences(other.protocol, ignore=("seed",))


def _most_comparable(series_by_run: Sequence[Sequence[ScoreSeries]]) -> tuple[ScoreSeries | None, ...]:
    """Of each run's scores of a name those under a protocol that most of them have, and of several such protocols one
    that was used last; where a run has none, what it used last."""

    def num_comparable(one: ScoreSeries) -> tuple[int, bool]:
        return sum(
            any(not _protocol_differences(other, one) for other in each) for each in series_by_run
        ), one.is_current

    wanted = max((one for each in series_by_run for one in each), key=num_comparable)
    return tuple(
        next((one for one in each if not _protocol_differences(one, wanted)), next(iter(each), None))
        for each in series_by_run
    )


def _best_column(cells: Sequence[tuple[int, ScoreSeries]]) -> int | None:
    """The place of the best last score; None for a name whose direction is not known, one run alone, or where another
    is written alike."""
    better = cells[0][1].direction
    finite = [(one.last.value, place) for place, one in cells if one.last.value == one.last.value]
    if len(cells) < 2 or not finite or better is None:
        return None
    best, place = (min if better == "lower" else max)(finite)
    return (
        place
        if sum(number_format.format_number(value) == number_format.format_number(best) for value, _ in finite) == 1
        else None
    )


def _kimg_range(rows: Sequence[ScoreRow]) -> tuple[float, float] | None:
    """The least and the most kimg after which scores were taken, where that differs."""
    kimg = [one.last.kimg for row in rows for one in row.cells if one]
    return (min(kimg), max(kimg)) if kimg and max(kimg) > 1.01 * min(kimg) else None


def _score_charts(runs: Sequence[ComparedRun], rows: Sequence[ScoreRow]) -> Iterator[Chart]:
    for row in rows[:MAX_COLUMNS]:
        lines = [
            side.make_line([score.kimg for score in one.scores], [score.value for score in one.scores])
            for side, one in zip(runs, row.cells)
            if one
        ]
        made = make_chart(row.name, row.direction, lines)
        if made and any(len(line.values) > 1 for line in lines):
            yield made


def _stat_charts(runs: Sequence[ComparedRun]) -> Iterator[Chart]:
    for title, unit, floor, key in CHARTS:
        columns = [(side, *side.run_data.stats.column(key)) for side in runs]
        lines = [side.make_line(kimg, values) for side, kimg, values in columns if values]
        if unit == "bytes":
            unit, lines = scale_to_byte_unit([line for line in lines if any(line.values)])
        if made := make_chart(title, unit, lines, floor):
            yield made


def _differing_fields(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """The fields of run.yaml in which the runs differ, and what each has there."""
    flat = [dict(number_format.flat_items(side.run_data.run)) for side in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = ((key, [one.get(key, "") for one in flat]) for key in keys)
    return [(key, values) for key, values in rows if len(set(values)) > 1]
