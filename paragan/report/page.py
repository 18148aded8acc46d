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

from paragan.core.atomic_write import atomic_write_bytes
from paragan.report import number_format
from paragan.report.charts import extra_charts, score_charts, standard_charts
from paragan.report.embedded_images import EmbeddedImage, ImageGallery, latest_grid, make_gallery
from paragan.report.figures import ReportFigures, load_figures
from paragan.report.labels import MAX_LABELS, LabelProgress
from paragan.report.run_data import MAX_RUN_YAML_CHARS, HealthEvent, RunData, StatsColumns, read_run_data
from paragan.report.scores import ScoreSeries, group_scores, shared_protocol, unique_protocols
from paragan.report.usage import age_histograms, sent_traffic, time_breakdown

MAX_PAGE_BYTES = 5_000_000  # bytes of a page
MAX_ROWS = 400  # scores, events, keys that are listed one by one
MAX_COLUMNS = 12  # of a table: protocols, scores of a label or a class
MAX_EVENT_MARKS = 40  # events that are marked on curves
MAX_CLASSES = 1000  # that have scores of their own on a page
MAX_LABEL_GRIDS = 24  # of a run per label that has no grid of all yet
HEADLINE_SETTINGS = ("strategy", "data", "batch", "lanes", "ranks", "seed")  # of run.yaml, where it has them


@dataclass(frozen=True)
class ClassScores:
    """Scores of every class, a column a score: those that were taken last."""

    series: tuple[ScoreSeries, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]  # class, values: nan where there is none
    column_max: tuple[float, ...]  # of each column
    num_omitted: int


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write `run_dir/report.html`, or `out`, and return its path.

    A run that has not finished, or has no scores or no ticks yet, gets a page that says so. Unusable is a
    folder that holds no run, or one with a file that cannot be read.
    """
    folder = read_run_data(Path(run_dir))
    target = out or folder.path / "report.html"
    facts, room = _template_variables(folder, target.parent.resolve() == folder.path.resolve())
    shown = load_figures(folder.path, room // 3)
    of_labels = [*_latest_label_grids(folder, room // 3)]
    used = shown.num_chars + sum(len(picture.uri) for _, _, picture in of_labels)
    pictures = make_gallery(folder.path, room - used)
    atomic_write_bytes(
        target, render_page("page.html", **facts, gallery=pictures, exhibits=shown, label_grids=of_labels)
    )
    return target


def _template_variables(run_data: RunData, link_labels: bool) -> tuple[dict[str, Any], int]:
    """What a page says, and the characters that are left for pictures: at least a third of a page, for which lists are
    cut where they have to be. links: whether the page is in the run folder."""
    empty = {"gallery": ImageGallery((), None, ()), "exhibits": ReportFigures(), "label_grids": []}
    facts, room = {**_chart_variables(run_data), "links": link_labels}, 0
    for part in (1, 4, 16, 64):
        facts |= {**_run_variables(run_data, part), **_score_variables(run_data, part), "abridged": part > 1}
        room = MAX_PAGE_BYTES - 50_000 - len(render_page("page.html", **facts, **empty))
        if room > MAX_PAGE_BYTES // 3:
            break
    return facts, max(room, 0)


def render_page(template: str, **variables: Any) -> bytes:
    """A page from its template."""
    return (
        _template_environment()
        .get_template(template)
        .render(**variables, written=datetime.datetime.now(datetime.UTC))
        .encode()
    )


@functools.cache
def _template_environment() -> Environment:
    here = FileSystemLoader(Path(__file__).parent)
    pages = Environment(loader=here, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(number=number_format.format_number, duration=number_format.format_duration)
    return pages


def _chart_variables(run_data: RunData) -> dict[str, Any]:
    marks = [event.kimg for event in run_data.events[:MAX_EVENT_MARKS]]
    return {
        "score_charts": [*score_charts(group_scores(run_data.scores), marks)],
        "charts": [*standard_charts(run_data.stats, marks)],
        "extra_charts": extra_charts(run_data.stats),
    }


def _run_variables(run_data: RunData, row_divisor: int) -> dict[str, Any]:
    """part: one of so many rows of every list."""
    stats, rows = run_data.stats, MAX_ROWS // row_divisor
    return {
        "run": summarize_run(run_data),
        "problems": [*_nonfinite_warnings(stats), *_bad_files_warning(run_data.bad_files)][:rows],
        "events": run_data.events[:rows],
        "event_kinds": _events_by_kind(run_data.events),
        "labels": run_data.labels[: MAX_LABELS // row_divisor],
        "done": sum(label.state == "done" for label in run_data.labels),
        "all_labels": len(run_data.labels),
        "label_scores": _label_score_names(run_data.labels)[:MAX_COLUMNS],
        "values": list(_stat_ranges(stats))[:rows],
        "times": time_breakdown(stats),
        "sent": sent_traffic(stats)[:MAX_COLUMNS],
        "ages": age_histograms(stats)[:MAX_COLUMNS],
        "decisions": run_data.decisions[-rows:],
        "about": run_data.reasons[:rows],
        "text": run_data.run_yaml if row_divisor == 1 else run_data.run_yaml[: MAX_RUN_YAML_CHARS // row_divisor],
    }


def _score_variables(run_data: RunData, row_divisor: int) -> dict[str, Any]:
    rows = MAX_ROWS // row_divisor
    measured = group_scores(run_data.scores)[:rows]
    taken = sorted(((one, score) for one in measured for score in one.scores), key=lambda pair: pair[1].kimg)
    known = unique_protocols(measured)[-MAX_COLUMNS:]
    return {
        "series": measured,
        "taken": taken[-rows:],
        "shared": shared_protocol([one.protocol for one in measured if one.is_current]),
        "protocols": known,
        "protocol_names": list(dict.fromkeys(name for protocol in known for name in protocol.entries))[:rows],
        "by_class": class_scores(measured, MAX_CLASSES // row_divisor),
    }


def class_scores(score_series: Sequence[ScoreSeries], max_classes: int = MAX_CLASSES) -> ClassScores | None:
    """None where no score says what it is of each class."""
    several = tuple(one for one in score_series if one.is_current and one.last.per_class)[:MAX_COLUMNS]
    names = list(dict.fromkeys(name for one in several for name in one.last.per_class))
    if not names:
        return None
    rows = tuple(
        (name, tuple(one.last.per_class.get(name, math.nan) for one in several)) for name in names[:max_classes]
    )
    columns = zip(*(values for _, values in rows))
    highest = tuple(max((value for value in column if math.isfinite(value)), default=0.0) for column in columns)
    return ClassScores(several, rows, highest, len(names) - len(rows))


def summarize_run(run_data: RunData) -> dict[str, Any]:
    """What is said of a run first."""
    speeds = run_data.stats.finite_values("Timing/img_per_sec")
    memory = run_data.stats.finite_values("Resources/peak_mem_gb")
    facts = {key: run_data.get_setting_name(key) for key in HEADLINE_SETTINGS}
    spent = sum(share.amount for share in time_breakdown(run_data.stats))
    return {
        "name": run_data.name,
        "recipe": run_data.get_setting_name("recipe", "name") or run_data.name,
        "state": run_data.state,
        "kimg": run_data.kimg,
        "total": run_data.total_kimg,
        "speed": median(speeds) if speeds else None,
        "seconds": spent or sum(label.seconds for label in run_data.labels),
        "memory": max(memory, default=None),
        "sent": number_format.format_bytes(total)
        if (total := sum(one.total_bytes for one in sent_traffic(run_data.stats)))
        else "",
        "facts": {key: text for key, text in facts.items() if text},
    }


def _events_by_kind(events: Sequence[HealthEvent]) -> list[tuple[str, list[HealthEvent]]]:
    """Events by kind, in order of appearance."""
    found = dict[str, list[HealthEvent]]()
    for event in events:
        found.setdefault(event.kind, []).append(event)
    return list(found.items())[:MAX_COLUMNS]


def _label_score_names(labels: Sequence[LabelProgress]) -> list[str]:
    return list(dict.fromkeys(name for label in labels for name in label.scores))


def _latest_label_grids(run_data: RunData, max_chars: int) -> Iterator[tuple[LabelProgress, int, EmbeddedImage]]:
    """The newest grid of each label, where there is none of all labels."""
    begun = [label for label in run_data.labels if label.folder][:MAX_LABEL_GRIDS]
    if begun and not latest_grid(run_data.path, max_chars):
        for label in begun:
            if found := latest_grid(run_data.path / label.folder, max_chars // len(begun)):
                yield label, *found


def _nonfinite_warnings(stats: StatsColumns) -> Iterator[str]:
    for key in stats.keys[:MAX_ROWS]:
        kimg, values = stats.column(key)
        lost = [at for at, value in zip(kimg, values) if not math.isfinite(value)]
        if lost:
            first = number_format.format_number(lost[0])
            told = f"was not finite at {len(lost):,} of {len(values):,} ticks, first at {first} kimg."
            yield f"{number_format.format_value(key)} {told}"


def _bad_files_warning(files: Sequence[str]) -> Iterator[str]:
    if files:
        first = files[0].replace("\t", ": ")[:300]
        yield f"{len(files):,} images could not be used, and others stood in for them (bad_files.txt), such as {first}"


def _stat_ranges(stats: StatsColumns) -> Iterator[tuple[str, float, float, float]]:
    """`(key, last, lowest, highest)` of every number that was recorded."""
    for key in stats.keys[:MAX_ROWS]:
        last, finite = stats.column(key)[1][-1], stats.finite_values(key)
        yield number_format.format_value(key), last, min(finite, default=math.nan), max(finite, default=math.nan)
