"""One HTML page about one run: self-contained, so that it can be mailed, printed, or kept for ten years."""

import datetime
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from paragan.core.atomic_write import write_whole
from paragan.report import number_format
from paragan.report.charts import extra_charts, named_charts, score_charts
from paragan.report.embedded_images import Gallery, Picture, gallery, latest
from paragan.report.figures import Exhibits, exhibits
from paragan.report.labels import MOST, Label
from paragan.report.run_data import TEXT, Event, Folder, Stats, read_folder
from paragan.report.scores import Series, protocols, series, shared
from paragan.report.usage import ages, bytes_sent, time_spent

LARGEST = 5_000_000  # bytes of a page
ROWS = 400  # scores, events, keys that are listed one by one
COLUMNS = 12  # of a table: protocols, scores of a label or a class
MARKS = 40  # events that are marked on curves
CLASSES = 1000  # that have scores of their own on a page
LABELS_DRAWN = 24  # of a run per label that has no grid of all yet
FACTS = ("strategy", "data", "batch", "lanes", "ranks", "seed")  # of run.yaml, where it has them


@dataclass(frozen=True)
class ClassScores:
    """Scores of every class, a column a score: those that were taken last."""

    series: tuple[Series, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]  # class, values: nan where there is none
    highest: tuple[float, ...]  # of each column
    left_out: int


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write `run_dir/report.html`, or `out`, and return its path.

    A run that has not finished, or has no scores or no ticks yet, gets a page that says so. Unusable is a
    folder that holds no run, or one with a file that cannot be read.
    """
    folder = read_folder(Path(run_dir))
    target = out or folder.path / "report.html"
    facts, room = _facts(folder, target.parent.resolve() == folder.path.resolve())
    shown = exhibits(folder.path, room // 3)
    of_labels = [*_label_grids(folder, room // 3)]
    used = shown.room + sum(len(picture.uri) for _, _, picture in of_labels)
    pictures = gallery(folder.path, room - used)
    write_whole(target, render("page.html", **facts, gallery=pictures, exhibits=shown, label_grids=of_labels))
    return target


def _facts(folder: Folder, links: bool) -> tuple[dict[str, Any], int]:
    """What a page says, and the characters that are left for pictures: at least a third of a page, for which lists are
    cut where they have to be. links: whether the page is in the run folder."""
    empty = {"gallery": Gallery((), None, ()), "exhibits": Exhibits(), "label_grids": []}
    facts, room = {**_drawn(folder), "links": links}, 0
    for part in (1, 4, 16, 64):
        facts |= {**_of_run(folder, part), **_of_scores(folder, part), "abridged": part > 1}
        room = LARGEST - 50_000 - len(render("page.html", **facts, **empty))
        if room > LARGEST // 3:
            break
    return facts, max(room, 0)


def render(page: str, **facts: Any) -> bytes:
    """A page from its template."""
    return _templates().get_template(page).render(**facts, written=datetime.datetime.now(datetime.UTC)).encode()


@functools.cache
def _templates() -> Environment:
    here = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(number=number_format.number, duration=number_format.duration)
    return pages


def _drawn(folder: Folder) -> dict[str, Any]:
    marks = [event.kimg for event in folder.events[:MARKS]]
    return {
        "score_charts": [*score_charts(series(folder.scores), marks)],
        "charts": [*named_charts(folder.stats, marks)],
        "extra_charts": extra_charts(folder.stats),
    }


def _of_run(folder: Folder, part: int) -> dict[str, Any]:
    """part: one of so many rows of every list."""
    stats, rows = folder.stats, ROWS // part
    return {
        "run": headline(folder),
        "problems": [*_problems(stats), *_bad(folder.bad_files)][:rows],
        "events": folder.events[:rows],
        "event_kinds": _kinds(folder.events),
        "labels": folder.labels[: MOST // part],
        "done": sum(label.state == "done" for label in folder.labels),
        "all_labels": len(folder.labels),
        "label_scores": _names(folder.labels)[:COLUMNS],
        "values": list(_values(stats))[:rows],
        "times": time_spent(stats),
        "sent": bytes_sent(stats)[:COLUMNS],
        "ages": ages(stats)[:COLUMNS],
        "decisions": folder.decisions[-rows:],
        "about": folder.about[:rows],
        "text": folder.text if part == 1 else folder.text[: TEXT // part],
    }


def _of_scores(folder: Folder, part: int) -> dict[str, Any]:
    rows = ROWS // part
    measured = series(folder.scores)[:rows]
    taken = sorted(((one, score) for one in measured for score in one.scores), key=lambda pair: pair[1].kimg)
    known = protocols(measured)[-COLUMNS:]
    return {
        "series": measured,
        "taken": taken[-rows:],
        "shared": shared([one.protocol for one in measured if one.current]),
        "protocols": known,
        "protocol_names": list(dict.fromkeys(name for protocol in known for name in protocol.entries))[:rows],
        "by_class": class_scores(measured, CLASSES // part),
    }


def class_scores(measured: Sequence[Series], most: int = CLASSES) -> ClassScores | None:
    """None where no score says what it is of each class."""
    several = tuple(one for one in measured if one.current and one.last.per_class)[:COLUMNS]
    names = list(dict.fromkeys(name for one in several for name in one.last.per_class))
    if not names:
        return None
    rows = tuple((name, tuple(one.last.per_class.get(name, math.nan) for one in several)) for name in names[:most])
    columns = zip(*(values for _, values in rows))
    highest = tuple(max((value for value in column if math.isfinite(value)), default=0.0) for column in columns)
    return ClassScores(several, rows, highest, len(names) - len(rows))


def headline(folder: Folder) -> dict[str, Any]:
    """What is said of a run first."""
    speeds = folder.stats.finite("Timing/img_per_sec")
    memory = folder.stats.finite("Resources/peak_mem_gb")
    facts = {key: folder.word(key) for key in FACTS}
    spent = sum(share.amount for share in time_spent(folder.stats))
    return {
        "name": folder.name,
        "recipe": folder.word("recipe", "name") or folder.name,
        "state": folder.state,
        "kimg": folder.kimg,
        "total": folder.total,
        "speed": median(speeds) if speeds else None,
        "seconds": spent or sum(label.seconds for label in folder.labels),
        "memory": max(memory, default=None),
        "sent": number_format.size(total) if (total := sum(one.bytes for one in bytes_sent(folder.stats))) else "",
        "facts": {key: text for key, text in facts.items() if text},
    }


def _kinds(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Events by kind, in order of appearance."""
    found = dict[str, list[Event]]()
    for event in events:
        found.setdefault(event.kind, []).append(event)
    return list(found.items())[:COLUMNS]


def _names(labels: Sequence[Label]) -> list[str]:
    return list(dict.fromkeys(name for label in labels for name in label.scores))


def _label_grids(folder: Folder, room: int) -> Iterator[tuple[Label, int, Picture]]:
    """The newest grid of each label, where there is none of all labels."""
    begun = [label for label in folder.labels if label.folder][:LABELS_DRAWN]
    if begun and not latest(folder.path, room):
        for label in begun:
            if found := latest(folder.path / label.folder, room // len(begun)):
                yield label, *found


def _problems(stats: Stats) -> Iterator[str]:
    for key in stats.keys[:ROWS]:
        kimg, values = stats.column(key)
        lost = [at for at, value in zip(kimg, values) if not math.isfinite(value)]
        if lost:
            first = number_format.number(lost[0])
            told = f"was not finite at {len(lost):,} of {len(values):,} ticks, first at {first} kimg."
            yield f"{number_format.value(key)} {told}"


def _bad(files: Sequence[str]) -> Iterator[str]:
    if files:
        first = files[0].replace("\t", ": ")[:300]
        yield f"{len(files):,} images could not be used, and others stood in for them (bad_files.txt), such as {first}"


def _values(stats: Stats) -> Iterator[tuple[str, float, float, float]]:
    """`(key, last, lowest, highest)` of every number that was recorded."""
    for key in stats.keys[:ROWS]:
        last, finite = stats.column(key)[1][-1], stats.finite(key)
        yield number_format.value(key), last, min(finite, default=math.nan), max(finite, default=math.nan)
