"""Write one HTML page about one run. The page is self-contained: it can be mailed, printed and archived."""

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
from paragan.report.embedded_audio import ReportAudio, load_audio
from paragan.report.embedded_images import EmbeddedImage, ImageGallery, latest_grid, make_gallery
from paragan.report.figures import ReportFigures, load_figures
from paragan.report.labels import MAX_LABELS, LabelProgress
from paragan.report.run_data import MAX_RUN_YAML_CHARS, HealthEvent, RunData, StatsColumns, read_run_data
from paragan.report.scores import ScoreSeries, group_scores, shared_protocol, unique_protocols
from paragan.report.usage import age_histograms, sent_traffic, time_breakdown

MAX_PAGE_BYTES = 5_000_000
MAX_ROWS = 400  # of a list: scores, events, keys
MAX_COLUMNS = 12  # of a table: protocols, scores of labels or classes
MAX_EVENT_MARKS = 40  # events marked on curves
MAX_CLASSES = 1000  # classes with scores on a page
MAX_LABEL_GRIDS = 24  # of a per-label run that has no common grid yet
HEADLINE_SETTINGS = ("strategy", "data", "batch", "lanes", "ranks", "seed")  # fields of run.yaml


@dataclass(frozen=True)
class LiveBar:
    """The first line of a page that is refreshed while it is open.

    state      : what the run does now
    tag        : of this version of the page, as an HTTP ETag
    interval_s : between two requests of the page
    overview   : address of the page of all runs; "" if there is none
    """

    state: str
    tag: str
    interval_s: float
    overview: str = ""


@dataclass(frozen=True)
class ClassScores:
    """The latest scores of every class, a column for each score."""

    series: tuple[ScoreSeries, ...]
    rows: tuple[tuple[str, tuple[float, ...]], ...]  # (class, values), nan where a class has no value
    column_max: tuple[float, ...]
    num_omitted: int  # classes beyond those in rows


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page about a run, complete or not, to `run_dir/report.html` or `out`. Returns the path.

    Raises:
        UsageError: the folder holds no run, or one of its files cannot be read.
    """
    run_data = read_run_data(Path(run_dir))
    target = out or run_data.path / "report.html"
    in_run_dir = target.parent.resolve() == run_data.path.resolve()
    atomic_write_bytes(target, render_run(run_data, "/report.html" if in_run_dir else None))
    return target


def render_run(run_data: RunData, label_link_suffix: str | None = None, live: LiveBar | None = None) -> bytes:
    """Return the page about a run.

    Args:
        label_link_suffix: follows the folder of a label in the link to its page; None: no links, as the page is not in
            the run folder.
        live: what a page shows that is refreshed while the run is trained.
    """
    variables, max_media_chars = _template_variables(run_data)
    variables |= {"label_link_suffix": label_link_suffix, "live": live}
    figures = load_figures(run_data.path, max_media_chars // 3)
    label_grids = list(_latest_label_grids(run_data, max_media_chars // 3))
    audio = load_audio(run_data.path, max_media_chars // 3)
    used_chars = figures.num_chars + audio.num_chars + sum(len(image.uri) for _, _, image in label_grids)
    gallery = make_gallery(run_data.path, max_media_chars - used_chars)
    media = {"gallery": gallery, "audio": audio, "figures": figures, "label_grids": label_grids}
    return render_page("page.html", **variables, **media)


def _template_variables(run_data: RunData) -> tuple[dict[str, Any], int]:
    """Return the variables of page.html without its images and waves, and the characters left for these.

    They get at least a third of a page; lists are shortened until they do.
    """
    no_media = {
        "gallery": ImageGallery((), None, ()),
        "audio": ReportAudio(),
        "figures": ReportFigures(),
        "label_grids": [],
        "label_link_suffix": "/report.html",
    }
    variables = _chart_variables(run_data)
    max_media_chars = 0
    for divisor in (1, 4, 16, 64):
        variables |= _run_variables(run_data, divisor)
        variables |= _score_variables(run_data, divisor)
        variables["abridged"] = divisor > 1
        max_media_chars = MAX_PAGE_BYTES - 50_000 - len(render_page("page.html", **variables, **no_media))
        if max_media_chars > MAX_PAGE_BYTES // 3:
            break
    return variables, max(max_media_chars, 0)


def render_page(template: str, **variables: Any) -> bytes:
    """Render a template of this folder."""
    now = datetime.datetime.now(datetime.UTC)
    text = _template_environment().get_template(template).render({"live": None, "written_at": now, **variables})
    return text.encode(errors="replace")


@functools.cache
def _template_environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(number=number_format.format_number, duration=number_format.format_duration)
    return environment


def _chart_variables(run_data: RunData) -> dict[str, Any]:
    marks = [event.kimg for event in run_data.events[:MAX_EVENT_MARKS]]
    return {
        "score_charts": list(score_charts(group_scores(run_data.scores), marks)),
        "charts": list(standard_charts(run_data.stats, marks)),
        "extra_charts": extra_charts(run_data.stats),
    }


def _run_variables(run_data: RunData, divisor: int) -> dict[str, Any]:
    """Return the variables about the run; every list is cut to its maximal length over `divisor`."""
    stats = run_data.stats
    max_rows = MAX_ROWS // divisor
    problems = [*_nonfinite_warnings(stats), *_bad_files_warning(run_data.bad_files)]
    run_yaml = run_data.run_yaml if divisor == 1 else run_data.run_yaml[: MAX_RUN_YAML_CHARS // divisor]
    return {
        "run": summarize_run(run_data),
        "problems": problems[:max_rows],
        "events": run_data.events[:max_rows],
        "events_by_kind": _events_by_kind(run_data.events),
        "labels": run_data.labels[: MAX_LABELS // divisor],
        "num_done": sum(label.state == "done" for label in run_data.labels),
        "num_labels": len(run_data.labels),
        "label_scores": _label_score_names(run_data.labels)[:MAX_COLUMNS],
        "stat_ranges": list(_stat_ranges(stats))[:max_rows],
        "time_breakdown": time_breakdown(stats),
        "sent_traffic": sent_traffic(stats)[:MAX_COLUMNS],
        "age_histograms": age_histograms(stats)[:MAX_COLUMNS],
        "membership": run_data.membership[-max_rows:],
        "decisions": run_data.decisions[-max_rows:],
        "reasons": run_data.reasons[:max_rows],
        "run_yaml": run_yaml,
    }


def _score_variables(run_data: RunData, divisor: int) -> dict[str, Any]:
    max_rows = MAX_ROWS // divisor
    series = group_scores(run_data.scores)[:max_rows]
    all_scores = sorted(((one, score) for one in series for score in one.scores), key=lambda pair: pair[1].kimg)
    protocols = unique_protocols(series)[-MAX_COLUMNS:]
    return {
        "series": series,
        "all_scores": all_scores[-max_rows:],
        "shared_protocol": shared_protocol([one.protocol for one in series if one.is_current]),
        "protocols": protocols,
        "protocol_names": list(dict.fromkeys(name for one in protocols for name in one.entries))[:max_rows],
        "by_class": class_scores(series, MAX_CLASSES // divisor),
    }


def class_scores(score_series: Sequence[ScoreSeries], max_classes: int = MAX_CLASSES) -> ClassScores | None:
    """Return the table of scores by class, or None if no score has values by class."""
    series = tuple(one for one in score_series if one.is_current and one.last.per_class)[:MAX_COLUMNS]
    names = list(dict.fromkeys(name for one in series for name in one.last.per_class))
    if not names:
        return None
    rows = tuple(
        (name, tuple(one.last.per_class.get(name, math.nan) for one in series)) for name in names[:max_classes]
    )
    columns = zip(*(values for _, values in rows))
    column_max = tuple(max((value for value in column if math.isfinite(value)), default=0.0) for column in columns)
    return ClassScores(series, rows, column_max, num_omitted=len(names) - len(rows))


def summarize_run(run_data: RunData) -> dict[str, Any]:
    """Return the headline of a run: state, progress, speed, time, memory, traffic and main settings."""
    speeds = run_data.stats.finite_values("Timing/img_per_sec")
    memory = run_data.stats.finite_values("Resources/peak_mem_gb")
    settings = {key: run_data.get_setting_name(key) for key in HEADLINE_SETTINGS}
    seconds = sum(item.amount for item in time_breakdown(run_data.stats))
    sent_bytes = sum(traffic.total_bytes for traffic in sent_traffic(run_data.stats))
    return {
        "name": run_data.name,
        "recipe": run_data.get_setting_name("recipe", "name") or run_data.name,
        "state": run_data.state,
        "kimg": run_data.kimg,
        "total": run_data.total_kimg,
        "speed": median(speeds) if speeds else None,
        "seconds": seconds or sum(label.seconds for label in run_data.labels),
        "memory": max(memory, default=None),
        "sent": number_format.format_bytes(sent_bytes) if sent_bytes else "",
        "settings": {key: text for key, text in settings.items() if text},
    }


def _events_by_kind(events: Sequence[HealthEvent]) -> list[tuple[str, list[HealthEvent]]]:
    """Group events by kind, in order of appearance."""
    by_kind: dict[str, list[HealthEvent]] = {}
    for event in events:
        by_kind.setdefault(event.kind, []).append(event)
    return list(by_kind.items())[:MAX_COLUMNS]


def _label_score_names(labels: Sequence[LabelProgress]) -> list[str]:
    return list(dict.fromkeys(name for label in labels for name in label.scores))


def _latest_label_grids(run_data: RunData, max_chars: int) -> Iterator[tuple[LabelProgress, int, EmbeddedImage]]:
    """Yield (label, kimg, newest grid) of each label, if the run has no grid of all labels yet."""
    labels = [label for label in run_data.labels if label.folder][:MAX_LABEL_GRIDS]
    if labels and not latest_grid(run_data.path, max_chars):
        for label in labels:
            if grid := latest_grid(run_data.path / label.folder, max_chars // len(labels)):
                yield label, *grid


def _nonfinite_warnings(stats: StatsColumns) -> Iterator[str]:
    for key in stats.keys[:MAX_ROWS]:
        kimg, values = stats.column(key)
        nonfinite_kimg = [at for at, value in zip(kimg, values) if not math.isfinite(value)]
        if nonfinite_kimg:
            first = number_format.format_number(nonfinite_kimg[0])
            count = f"{len(nonfinite_kimg):,} of {len(values):,} ticks"
            yield f"{number_format.format_value(key)} was not finite at {count}, first at {first} kimg."


def _bad_files_warning(files: Sequence[str]) -> Iterator[str]:
    if files:
        first = files[0].replace("\t", ": ")[:300]
        could_not = "image could not be used and was" if len(files) == 1 else "images could not be used and were"
        yield f"{len(files):,} {could_not} replaced by others of the class (bad_files.txt), such as {first}"


def _stat_ranges(stats: StatsColumns) -> Iterator[tuple[str, float, float, float]]:
    """Yield `(key, last, lowest, highest)` of every recorded number."""
    for key in stats.keys[:MAX_ROWS]:
        last = stats.column(key)[1][-1]
        finite = stats.finite_values(key)
        yield number_format.format_value(key), last, min(finite, default=math.nan), max(finite, default=math.nan)
