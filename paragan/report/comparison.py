"""Write one HTML page that compares several runs: curves, latest scores, sample grids and settings."""

import math
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

MAX_CELLS = 800  # of a table
MAX_PROTOCOL_ENTRIES = 60
MAX_RUNS = 16  # eight colours, then the same eight dashed
NO_FLOOR = math.inf
CHARTS = (  # title, unit, y_floor of make_chart, key
    ("Loss of G", "", NO_FLOOR, "Loss/G/loss"),
    ("Loss of D", "", NO_FLOOR, "Loss/D/loss"),
    ("D's score of reals", "", NO_FLOOR, "Loss/scores/real"),
    ("D's score of fakes", "", NO_FLOOR, "Loss/scores/fake"),
    ("Throughput", "images/s", 0, "Timing/img_per_sec"),
    ("Bytes sent for G", "bytes", 0, "Comm/G/sent_bytes"),
    ("Bytes sent for D", "bytes", 0, "Comm/D/sent_bytes"),
    ("Consensus of G", "relative", 0, "Consensus/G"),
    ("Consensus of D", "relative", 0, "Consensus/D"),
    ("Peak memory", "GB", 0, "Resources/peak_mem_gb"),
)


@dataclass(frozen=True)
class ComparedRun:
    """One of the runs of a page."""

    name: str
    colour: str
    dashed: bool
    run_data: RunData
    summary: Mapping[str, Any]
    series: Sequence[ScoreSeries]
    time_breakdown: Sequence[BreakdownItem]
    sample_grid: tuple[int, EmbeddedImage] | None  # (kimg, newest grid)

    def series_named(self, name: str) -> list[ScoreSeries]:
        """Return the series of a score, one for each protocol, the current one first."""
        return sorted((one for one in self.series if one.name == name), key=lambda one: not one.is_current)

    def make_line(self, kimg: Sequence[float], values: Sequence[float]) -> Line:
        return Line(self.name, kimg, values, self.colour, self.dashed)


@dataclass(frozen=True)
class ScoreRow:
    """The latest value of one score for every run."""

    name: str
    direction: str
    cells: tuple[ScoreSeries | None, ...]  # by run
    best_column: int | None  # None if not all are comparable
    warnings: tuple[str, ...]


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page about several runs to `out`. Returns the path.

    Raises:
        UsageError: a folder holds no run or is named twice, or there are more than MAX_RUNS.
    """
    names = _distinct_names(run_dirs)
    known_protocols: dict[str, RecordedProtocol] = {}
    max_image_chars = (MAX_PAGE_BYTES * 2 // 3) // (len(names) + 1)
    runs: list[ComparedRun] = []
    for i, (name, path) in enumerate(zip(names, run_dirs)):
        run_data = read_run_data(Path(path))
        runs.append(
            ComparedRun(
                name=name,
                colour=f"r{i % 8 + 1}",
                dashed=i >= 8,
                run_data=run_data,
                summary=summarize_run(run_data),
                series=group_scores(run_data.scores, known_protocols)[:MAX_ROWS],
                time_breakdown=time_breakdown(run_data.stats),
                sample_grid=latest_grid(run_data.path, max_image_chars),
            )
        )
    protocols = unique_protocols([one for run in runs for one in run.series])[-MAX_COLUMNS:]
    rows = list(_score_rows(runs))[: MAX_CELLS // len(runs)]
    real_grids = (embed_image(run.run_data.path / "reals.png", max_image_chars) for run in runs)
    page = render_page(
        "comparison.html",
        runs=runs,
        rows=rows,
        kimg_range=_kimg_range(rows),
        protocols=protocols,
        protocol_names=list(dict.fromkeys(name for one in protocols for name in one.entries))[:MAX_PROTOCOL_ENTRIES],
        charts=[*_score_charts(runs, rows), *_stat_charts(runs)],
        fields=_differing_fields(runs)[: MAX_CELLS // len(runs)],
        reals=next((grid for grid in real_grids if grid), None),
    )
    atomic_write_bytes(out, page)
    return out


def _distinct_names(run_dirs: Sequence[Path]) -> list[str]:
    """Name each folder by as many of its last path components as make the names distinct."""
    if len(run_dirs) > MAX_RUNS:
        raise UsageError(f"{len(run_dirs)} RUN_DIRs: a page shows at most {MAX_RUNS}. Use fewer")
    paths = [Path(path).resolve() for path in run_dirs]
    repeated = next((run_dir for run_dir, path in zip(run_dirs, paths) if paths.count(path) > 1), None)
    if repeated:
        raise UsageError(f"{repeated}: this run folder is named twice. Use every folder once")
    for num_parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _score_rows(runs: Sequence[ComparedRun]) -> Iterator[ScoreRow]:
    names = dict.fromkeys(one.name for run in runs for one in run.series if one.is_current)
    for name in names:
        cells = _most_comparable([run.series_named(name) for run in runs])
        filled = [(column, series) for column, series in enumerate(cells) if series]
        first_column, reference = filled[0]
        warnings: list[str] = []
        for column, series in filled:
            if differences := series.incomparable_with(reference):
                warnings.append(
                    f"{name} of {runs[column].name} ({series.protocol.label}) is not comparable with that of "
                    f"{runs[first_column].name} ({reference.protocol.label}): {'; '.join(differences)}."
                )
        best_column = None if warnings else _best_column(filled)
        yield ScoreRow(name, describe_direction(reference), cells, best_column, tuple(warnings))


def _most_comparable(series_by_run: Sequence[Sequence[ScoreSeries]]) -> tuple[ScoreSeries | None, ...]:
    """Choose one series of a score for each run.

    Prefer the protocol that most runs have, and among those a current one. A run without it contributes its current
    series, a run without this score None.
    """

    def num_comparable(candidate: ScoreSeries) -> tuple[int, bool]:
        count = 0
        for series in series_by_run:
            count += any(not one.incomparable_with(candidate) for one in series)
        return count, candidate.is_current

    reference = max((one for series in series_by_run for one in series), key=num_comparable)
    return tuple(
        next((one for one in series if not one.incomparable_with(reference)), next(iter(series), None))
        for series in series_by_run
    )


def _best_column(cells: Sequence[tuple[int, ScoreSeries]]) -> int | None:
    """Return the column of the best latest value.

    None if there is a single run, the score has no known direction, or two values look the same when formatted.
    """
    direction = cells[0][1].direction
    values = [(series.last.value, column) for column, series in cells if not math.isnan(series.last.value)]
    if len(cells) < 2 or not values or direction is None:
        return None
    best, column = min(values) if direction == "lower" else max(values)
    text = number_format.format_number(best)
    is_unique = sum(number_format.format_number(value) == text for value, _ in values) == 1
    return column if is_unique else None


def _kimg_range(rows: Sequence[ScoreRow]) -> tuple[float, float] | None:
    """Return the smallest and largest kimg of the latest scores, or None if they are equal within 1 %."""
    kimg = [series.last.kimg for row in rows for series in row.cells if series]
    return (min(kimg), max(kimg)) if kimg and max(kimg) > 1.01 * min(kimg) else None


def _score_charts(runs: Sequence[ComparedRun], rows: Sequence[ScoreRow]) -> Iterator[Chart]:
    for row in rows[:MAX_COLUMNS]:
        lines = [
            run.make_line([score.kimg for score in series.scores], [score.value for score in series.scores])
            for run, series in zip(runs, row.cells)
            if series
        ]
        chart = make_chart(row.name, row.direction, lines)
        if chart and any(len(line.values) > 1 for line in lines):
            yield chart


def _stat_charts(runs: Sequence[ComparedRun]) -> Iterator[Chart]:
    for title, unit, y_floor, key in CHARTS:
        columns = [(run, *run.run_data.stats.column(key)) for run in runs]
        lines = [run.make_line(kimg, values) for run, kimg, values in columns if values]
        if unit == "bytes":
            unit, lines = scale_to_byte_unit([line for line in lines if any(line.values)])
        if chart := make_chart(title, unit, lines, y_floor):
            yield chart


def _differing_fields(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return the dotted fields of run.yaml that differ between the runs, with the value of each run."""
    flat = [dict(number_format.flat_items(run.run_data.run)) for run in runs]
    keys = dict.fromkeys(key for fields in flat for key in fields)
    rows = [(key, [fields.get(key, "") for fields in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
