"""One HTML page about one run: self-contained, so that it can be mailed, printed, or kept for ten years."""

import datetime
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, StrictUndefined, Template

from paragan.report import words
from paragan.report.curves import Chart, Line, chart
from paragan.report.folder import Folder, Stats, read_folder
from paragan.report.pictures import Gallery, gallery
from paragan.report.records import is_number, write_whole
from paragan.report.scores import Series, protocols, series, shared

LARGEST = 5_000_000  # bytes of a page
ROWS = 400  # scores listed one by one
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
    ("Peak memory", "GB", 0, (("peak memory", "Resources/peak_mem_gb", "other"),)),
)
FACTS = ("strategy", "data", "batch", "lanes", "ranks", "seed")  # of run.yaml, where it has them
SHOWN_ELSEWHERE = {"Progress/kimg", "Progress/step", "Timing/total_s", "Timing/sec_per_kimg"}


@dataclass(frozen=True)
class Share:
    """Where a part of the time went."""

    name: str
    colour: str
    seconds: float
    part: float  # of the whole, 0 to 1


def write_report(run_dir: Path) -> Path:
    """Write `run_dir/report.html` and return its path.

    A run that has not finished, or has no scores or no ticks yet, gets a page that says so. Unusable is a
    folder that holds no run, or one with a file that cannot be read.
    """
    folder = read_folder(run_dir)
    measured = series(folder.scores)
    taken = sorted(((one, score) for one in measured for score in one.scores), key=lambda pair: pair[1].kimg)
    known = protocols(measured)
    facts = {
        "run": _headline(folder),
        "problems": [*_problems(folder.stats), *_bad(folder.bad_files)],
        "series": measured,
        "taken": taken[-ROWS:],
        "labels": folder.labels,
        "label_scores": list(dict.fromkeys(name for row in folder.labels for name in row["scores"])),
        "shared": shared([one.protocol for one in measured if one.current]),
        "protocols": known,
        "protocol_names": list(dict.fromkeys(name for protocol in known for name in protocol.entries)),
        "charts": [*_score_charts(measured), *_named_charts(folder.stats)],
        "extra_charts": _extra_charts(folder.stats),
        "values": list(_values(folder.stats)),
        "times": time_spent(folder.stats),
        "decisions": folder.decisions[-ROWS:],
        "text": folder.text,
        "written": datetime.datetime.now(datetime.UTC),
    }
    without = len(_render(gallery=Gallery((), None, ()), **facts).encode())
    pictures = gallery(folder.path, room=max(LARGEST - 50_000 - without, 0))
    target = folder.path / "report.html"
    write_whole(target, _render(gallery=pictures, **facts).encode())
    return target


def time_spent(stats: Stats) -> list[Share]:
    """The run's seconds by what they went into; nothing where no time was recorded.

    `Timing/total_s` is the whole; it may start again at 0 where a run was resumed. The waits are those of
    each tick. A trainer whose ticks leave out scores, samples and checkpoints spends time between them.
    """
    total = _run_up(stats.finite("Timing/total_s"))
    kimg, pace = stats.column("Timing/sec_per_kimg")
    steps = [max(now - before, 0) for before, now in zip([0.0, *kimg], kimg)]
    ticks = sum(step * seconds for step, seconds in zip(steps, pace) if math.isfinite(seconds)) or total
    data = min(sum(stats.finite("Timing/data_wait_s")), ticks)
    exchange = min(sum(stats.finite("Timing/exchange_wait_s")), ticks - data)
    parts = {
        "computing and the rest": ("g", ticks - data - exchange),
        "waiting for data": ("d", data),
        "waiting for other ranks": ("real", exchange),
        "between ticks (scores, samples, checkpoints)": ("other", max(total - ticks, 0)),
    }
    whole = sum(seconds for _, seconds in parts.values())
    if not whole:
        return []
    return [Share(name, colour, spent, spent / whole) for name, (colour, spent) in parts.items() if spent]


def _run_up(clock: Sequence[float]) -> float:
    """What a clock that may have been set back to zero has counted in all."""
    return sum(now - before if now >= before else now for before, now in zip([0.0, *clock], clock))


def _render(**facts: Any) -> str:
    return _template().render(**facts)


@functools.cache
def _template() -> Template:
    pages = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    pages.filters.update(number=words.number, duration=words.duration)
    return pages.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))


def _headline(folder: Folder) -> dict[str, Any]:
    done = max(folder.stats.finite("Progress/kimg"), default=0.0)
    total = folder.setting("kimg", "duration.kimg")
    total = float(total) if is_number(total) else None
    speeds = folder.stats.finite("Timing/img_per_sec")
    memory = folder.stats.finite("Resources/peak_mem_gb")
    name = folder.path.resolve().name
    facts = {key: folder.word(key) for key in FACTS}
    return {
        "name": name,
        "recipe": folder.word("recipe", "name") or name,
        "state": _state(folder, done, total),
        "kimg": done,
        "total": total,
        "speed": median(speeds) if speeds else None,
        "seconds": sum(share.seconds for share in time_spent(folder.stats)),
        "memory": max(memory, default=None),
        "facts": {key: text for key, text in facts.items() if text},
    }


def _state(folder: Folder, done: float, total: float | None) -> str:
    if not folder.stats.keys:
        return "no ticks yet"
    if total is None:
        return "finished" if (folder.path / "model" / "model.safetensors").exists() else "unfinished"
    return "finished" if done >= total * (1 - 1e-6) else "unfinished"


def _problems(stats: Stats) -> Iterator[str]:
    for key in stats.keys:
        kimg, values = stats.column(key)
        lost = [at for at, value in zip(kimg, values) if not math.isfinite(value)]
        if lost:
            first = words.number(lost[0])
            yield f"{key} was not finite at {len(lost):,} of {len(values):,} ticks, first at {first} kimg."


def _bad(files: Sequence[str]) -> Iterator[str]:
    if files:
        first = files[0].replace("\t", ": ")[:300]
        yield f"{len(files):,} images could not be used, and others stood in for them (bad_files.txt), such as {first}"


def _score_charts(measured: Sequence[Series]) -> Iterator[Chart]:
    by_name: dict[str, list[Series]] = {}
    for one in measured:
        by_name.setdefault(one.name, []).append(one)
    for name, several in list(by_name.items())[:EXTRA]:
        lines = [
            Line(
                one.protocol.label,
                [score.kimg for score in one.scores],
                [score.value for score in one.scores],
                ("g", "d", "real", "other")[place % 4],
            )
            for place, one in enumerate(several[:4])
        ]
        direction = f"{several[0].better} is better" if several[0].better else ""
        made = chart(name, direction, lines)
        if made and any(len(line.values) > 1 for line in lines):
            yield made


def _named_charts(stats: Stats) -> Iterator[Chart]:
    for title, unit, floor, wanted in CHARTS:
        lines = [Line(name, *stats.column(key), colour) for name, key, colour in wanted]
        if unit == "bytes":
            unit, lines = _in_units_of_bytes([line for line in lines if any(line.values)])
        made = chart(title, unit, [line for line in lines if line.values], floor)
        if made:
            yield made


def _in_units_of_bytes(lines: Sequence[Line]) -> tuple[str, list[Line]]:
    most = max((value for line in lines for value in line.values if math.isfinite(value)), default=0)
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("bytes", 1))
    unit, size = next((unit, size) for unit, size in units if most >= size or size == 1)
    scaled = [Line(line.name, line.kimg, [v / size for v in line.values], line.colour) for line in lines]
    return f"{unit} a tick", scaled


def _extra_charts(stats: Stats) -> list[Chart]:
    named = SHOWN_ELSEWHERE | {key for *_, wanted in CHARTS for _, key, _ in wanted}
    lines = [Line(key, *stats.column(key), "other") for key in stats.keys if key not in named]
    moving = [line for line in lines if len(set(line.values)) > 1][:EXTRA]
    return [made for line in moving if (made := chart(line.name[: words.LONGEST], "", [line]))]


def _values(stats: Stats) -> Iterator[tuple[str, float, float, float]]:
    """`(key, last, lowest, highest)` of every number that was recorded."""
    for key in stats.keys[:ROWS]:
        last, finite = stats.column(key)[1][-1], stats.finite(key)
        yield key, last, min(finite, default=math.nan), max(finite, default=math.nan)
