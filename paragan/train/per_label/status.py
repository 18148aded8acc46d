"""What a run is doing, or each of its labels: read from its folder, without disturbing anyone."""

from __future__ import annotations

import fcntl
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paragan.config.run import Run
from paragan.core.jsonl import Row, is_number, newest, read, told
from paragan.core.schema import build, read_yaml
from paragan.models.model_files import read_config
from paragan.strategies.per_label_wcgan import NAMES
from paragan.train.callbacks.best_model import so_far
from paragan.train.per_label.label_dirs import taken
from paragan.train.per_label.lease_queue import Entry, Leases, gone
from paragan.train.per_label.worker import POOLED
from paragan.train.run_dir import RunFolder, existing

HEADING = ("label", "class", "images", "state", "kimg", "minutes", "worker", "scores")


def status(path: Path) -> str:
    """Lines for people."""
    folder = existing(path)
    record = read_yaml(folder / "run.yaml")
    if str(record.get("strategy", {}).get("name")) in NAMES:
        return "\n".join(
            _of_labels(
                folder, build(Run, {name: part for name, part in record.items() if name not in ("nets", "objective")})
            )
        )
    return _of_one(RunFolder(folder), float(record.get("kimg", 0)))


def _of_one(folder: RunFolder, kimg: float) -> str:
    lines, seen = _stats(folder.path), folder.images_seen / 1000
    at = max(float(lines[-1]["Progress/kimg"]) if lines else 0.0, seen)  # it may have been stopped between two lines
    owner = _owner(folder)
    state = f"trained by {owner}" if owner else "complete" if seen >= round(kimg, 6) else "stopped"
    pace = f", {lines[-1].get('Timing/img_per_sec', 0):,.0f} img/s" if lines and owner else ""
    told = f"{_scores(folder.path)}{_beside(folder.path)}"
    return f"{folder.path}: {state}, {at:g} of {kimg:g} kimg{pace}, checkpoint at {seen:g} kimg{told}"


def _stats(folder: Path) -> list[Row]:
    """Lines that say how far a run had come, as ours do."""
    return [row for row in read(folder / "stats.jsonl") if is_number(row.get("Progress/kimg"))]


def _beside(folder: Path) -> str:
    """The best model, and what was found wrong."""
    best, wrong = so_far(folder), read(folder / "health.jsonl")
    kept = f"; best {best['name']} {best['value']:.4g} at {best['kimg']:g} kimg" if best else ""
    shown = newest(read(folder / "metrics.jsonl")).get(best["name"]) if best else None
    if best and shown and shown.get("fingerprint") != best["fingerprint"]:
        kept += " (of scores that were taken otherwise)"
    return kept + "".join(f"; {row['action']} at {row['kimg']:g} kimg: {row['kind']}" for row in wrong)


def _owner(folder: RunFolder) -> str:
    """Who is writing in a folder, empty if nobody is."""
    try:
        with (folder.path / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except FileNotFoundError:
        return ""
    except OSError:
        return folder.owner()


def _of_labels(folder: Path, run: Run) -> Iterator[str]:
    assert run.per_label is not None
    about = read_config(folder / "model")
    names, counts = [str(name) for name in about["classes"]], [int(count) for count in about["images"]]
    entries, now = Leases(folder / "queue", run.per_label.lease_s).entries(), _now(folder)
    rows = [
        _row(folder, label, name, counts[label], entries.get(f"{label:04d}"), now, run.per_label.lease_s)
        for label, name in enumerate(names)
    ]
    widths = [max(len(row[column]) for row in (HEADING, *rows)) for column in range(len(HEADING))]
    for row in (HEADING, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    states = [row[3].split(":")[0].split(",")[0] for row in rows]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    spent = sum(float(row[5] or 0) for row in rows)
    kimg = sum(float(row[4]) for row in rows)
    yield f"{folder}: {len(rows)} labels, {counted}; {kimg:g} of {run.kimg:g} kimg, {spent:.3g} minutes of training"
    if scores := _scores(folder):
        now_of = {job: entry.number for job, entry in entries.items() if job != POOLED}
        stale = POOLED not in entries or entries[POOLED].about.get("of") != now_of
        yield f"all labels{' (before what was trained since)' if stale else ''}{scores}"


def _row(
    folder: Path, label: int, name: str, count: int, entry: Entry | None, now: float, lease_s: float
) -> tuple[str, ...]:
    under_way = entry and taken(folder, label, entry.number)
    lines = _stats(under_way) if under_way and entry and entry.state == "held" else []
    images = 1000 * float(lines[-1]["Progress/kimg"]) if lines else 0.0
    about: Mapping[str, Any] = entry.about if entry else {}
    kimg = max(images, float(about.get("images", about.get("from", 0)))) / 1000
    seconds = float(lines[-1].get("Timing/total_s", 0) if lines else about.get("seconds", 0))
    scores = "  ".join(f"{key} {value:.3g}" for key, value in about.get("scores", {}).items())
    state = _state(entry, now, lease_s)
    who = entry.worker if entry and state not in ("waiting", "replaced") else str(about.get("replaced", ""))
    return (str(label), name, f"{count:,}", state, f"{kimg:g}", f"{seconds / 60:.2f}" if seconds else "", who, scores)


def _state(entry: Entry | None, now: float, lease_s: float) -> str:
    if entry is None or "again" in entry.about:
        return "waiting"
    if entry.state == "held":
        silent = now - entry.mark / 1e9
        if gone(entry.about.get("process")):
            return "lost, to be taken over"
        return "training" if silent < lease_s else f"silent, for {silent:.0f} s"
    reason = f": {entry.about.get('reason', '')}"[:60] if entry.state == "failed" else ""
    if "replaced" in entry.about:
        return "replaced"
    return {"free": "stopped", "done": "done", "failed": "failed"}[entry.state] + reason


def _now(folder: Path) -> float:
    """The time by the clock that gives the folder's files theirs; ours where nothing can be written there."""
    mark = folder / f".now-{secrets.token_hex(8)}"
    try:
        mark.touch()
        now = mark.stat().st_mtime
        mark.unlink()
        return now
    except OSError:
        return time.time()


def _scores(folder: Path) -> str:
    scores = told(read(folder / "metrics.jsonl"))
    return f": {scores}" if scores else ""
