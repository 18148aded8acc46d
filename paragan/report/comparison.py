"""One HTML page about several runs: curves over each other, scores, grids and settings side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paragan.core.atomic_write import write_whole
from paragan.core.errors import Unusable
from paragan.report import number_format
from paragan.report.charts import direction, in_units_of_bytes
from paragan.report.embedded_images import Picture, latest, picture_in
from paragan.report.page import COLUMNS, LARGEST, ROWS, headline, render
from paragan.report.run_data import Folder, read_folder
from paragan.report.scores import Protocol, Series, protocols, series
from paragan.report.svg_plot import Chart, Line, chart
from paragan.report.usage import Share, time_spent

CELLS, NAMES = 800, 60  # of a table, and of what a protocol says, at most
MOST = 16  # runs: eight colours, then eight dashed
HEIGHT = float("inf")
CHARTS = (  # title, unit, where the axis begins at the latest, key
    ("Loss of G", "", HEIGHT, "Loss/G/loss"),
    ("Loss of D", "", HEIGHT, "Loss/D/loss"),
    ("D's score of reals", "", HEIGHT, "Loss/scores/real"),
    ("D's score of fakes", "", HEIGHT, "Loss/scores/fake"),
    ("Throughput", "images/s", 0, "Timing/img_per_sec"),
    ("Bytes sent for G", "bytes", 0, "Comm/G/sent_bytes"),
    ("Bytes sent for D", "bytes", 0, "Comm/D/sent_bytes"),
    ("Consensus of G", "of its norm", 0, "Consensus/G"),
    ("Consensus of D", "of its norm", 0, "Consensus/D"),
    ("Peak memory", "GB", 0, "Resources/peak_mem_gb"),
)


@dataclass(frozen=True)
class Side:
    """One of the runs."""

    name: str
    colour: str
    dashed: bool
    folder: Folder
    about: Mapping[str, Any]
    series: Sequence[Series]
    times: Sequence[Share]
    grid: tuple[int, Picture] | None

    def of(self, name: str) -> list[Series]:
        """Its scores of a name, under every protocol; the one that was used last comes first."""
        return sorted((one for one in self.series if one.name == name), key=lambda one: not one.current)

    def line(self, kimg: Sequence[float], values: Sequence[float]) -> Line:
        return Line(self.name, kimg, values, self.colour, self.dashed)


@dataclass(frozen=True)
class Row:
    """The last scores of one name. best: place of the best, where all may be compared."""

    name: str
    better: str
    cells: tuple[Series | None, ...]
    best: int | None
    warnings: tuple[str, ...]


def write_comparison(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write a page about several runs and return its path. Unusable is a folder that holds no run, the same folder
    twice, and more runs than there are colours."""
    names = _names(run_dirs)
    folders = [read_folder(Path(path)) for path in run_dirs]
    known: dict[str, Protocol] = {}
    measured = [series(folder.scores, known)[:ROWS] for folder in folders]
    room = (LARGEST * 2 // 3) // (len(folders) + 1)
    sides = [
        Side(
            name,
            f"r{place % 8 + 1}",
            place >= 8,
            folder,
            headline(folder),
            scores,
            time_spent(folder.stats),
            latest(folder.path, room),
        )
        for place, (name, folder, scores) in enumerate(zip(names, folders, measured))
    ]
    used = protocols([one for scores in measured for one in scores])[-COLUMNS:]
    rows = [*_rows(sides)][: CELLS // len(sides)]
    facts = {
        "sides": sides,
        "rows": rows,
        "unlike": _unlike(rows),
        "protocols": used,
        "protocol_names": list(dict.fromkeys(name for one in used for name in one.entries))[:NAMES],
        "charts": [*_score_charts(sides, rows), *_charts(sides)],
        "fields": _fields(sides)[: CELLS // len(sides)],
        "reals": next((found for side in sides if (found := picture_in(side.folder.path / "reals.png", room))), None),
    }
    write_whole(out, render("comparison.html", **facts))
    return out


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """What each folder is called: as much of its path as tells it from the others."""
    if len(run_dirs) > MOST:
        raise Unusable(f"{len(run_dirs)} RUN_DIRs are more than a page tells apart: give at most {MOST}")
    paths = [Path(path).resolve() for path in run_dirs]
    twice = next((given for given, path in zip(run_dirs, paths) if paths.count(path) > 1), None)
    if twice:
        raise Unusable(f"RUN_DIR {twice} is given twice: give every folder once")
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _rows(sides: Sequence[Side]) -> Iterator[Row]:
    names = dict.fromkeys(one.name for side in sides for one in side.series if one.current)
    for name in names:
        cells = _alike([side.of(name) for side in sides])
        there = [(place, one) for place, one in enumerate(cells) if one]
        first, reference = there[0]
        warnings = tuple(
            f"{name} of {sides[place].name} ({one.protocol.label}) is not comparable with that of {sides[first].name} "
            f"({reference.protocol.label}): {'; '.join(differs)}."
            for place, one in there
            if (differs := _differences(one, reference))
        )
        yield Row(name, direction(reference), cells, None if warnings else _best(there), warnings)


def _differences(one: Series, other: Series) -> list[str]:
    """Why they may not be compared."""
    return one.protocol.differences(other.protocol, but=("seed",))


def _alike(found: Sequence[Sequence[Series]]) -> tuple[Series | None, ...]:
    """Of each run's scores of a name those under a protocol that most of them have, and of several such protocols one
    that was used last; where a run has none, what it used last."""

    def others(one: Series) -> tuple[int, bool]:
        return sum(any(not _differences(other, one) for other in each) for each in found), one.current

    wanted = max((one for each in found for one in each), key=others)
    return tuple(next((one for one in each if not _differences(one, wanted)), next(iter(each), None)) for each in found)


def _best(there: Sequence[tuple[int, Series]]) -> int | None:
    """The place of the best last score; None for a name whose direction is not known, one run alone, or where another
    is written alike."""
    better = there[0][1].better
    finite = [(one.last.value, place) for place, one in there if one.last.value == one.last.value]
    if len(there) < 2 or not finite or better is None:
        return None
    best, place = (min if better == "lower" else max)(finite)
    return place if sum(number_format.number(value) == number_format.number(best) for value, _ in finite) == 1 else None


def _unlike(rows: Sequence[Row]) -> tuple[float, float] | None:
    """The least and the most kimg after which scores were taken, where that differs."""
    kimg = [one.last.kimg for row in rows for one in row.cells if one]
    return (min(kimg), max(kimg)) if kimg and max(kimg) > 1.01 * min(kimg) else None


def _score_charts(sides: Sequence[Side], rows: Sequence[Row]) -> Iterator[Chart]:
    for row in rows[:COLUMNS]:
        lines = [
            side.line([score.kimg for score in one.scores], [score.value for score in one.scores])
            for side, one in zip(sides, row.cells)
            if one
        ]
        made = chart(row.name, row.better, lines)
        if made and any(len(line.values) > 1 for line in lines):
            yield made


def _charts(sides: Sequence[Side]) -> Iterator[Chart]:
    for title, unit, floor, key in CHARTS:
        columns = [(side, *side.folder.stats.column(key)) for side in sides]
        lines = [side.line(kimg, values) for side, kimg, values in columns if values]
        if unit == "bytes":
            unit, lines = in_units_of_bytes([line for line in lines if any(line.values)])
        if made := chart(title, unit, lines, floor):
            yield made


def _fields(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """The fields of run.yaml in which the runs differ, and what each has there."""
    flat = [dict(number_format.fields(side.folder.run)) for side in sides]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = ((key, [one.get(key, "") for one in flat]) for key in keys)
    return [(key, values) for key, values in rows if len(set(values)) > 1]
