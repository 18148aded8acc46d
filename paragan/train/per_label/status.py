"""What a run is doing, or each of its labels: read from its folder, without disturbing anyone."""

from __future__ import annotations

import fcntl
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paragan.config.run import Run
from paragan.core.jsonl import Row, format_scores, is_number, newest_scores, read_jsonl
from paragan.core.schema import from_dict, read_yaml
from paragan.models.model_files import read_model_config
from paragan.strategies.per_label_wcgan import PER_LABEL_NAMES
from paragan.train.callbacks.best_model import read_best
from paragan.train.per_label.label_dirs import leased_label_dir
from paragan.train.per_label.lease_queue import LeaseEntry, LeaseQueue, is_process_gone
from paragan.train.per_label.worker import FINALIZE_JOB
from paragan.train.run_dir import RunDir, require_run_dir

COLUMNS = ("label", "class", "images", "state", "kimg", "minutes", "worker", "scores")


def format_status(path: Path) -> str:
    """Lines for people."""
    folder = require_run_dir(path)
    record = read_yaml(folder / "run.yaml")
    if str(record.get("strategy", {}).get("name")) in PER_LABEL_NAMES:
        return "\n".join(
            _format_labels(
                folder,
                from_dict(Run, {name: part for name, part in record.items() if name not in ("nets", "objective")}),
            )
        )
    return _format_run(RunDir(folder), float(record.get("kimg", 0)))


def _format_run(run_dir: RunDir, kimg: float) -> str:
    lines, seen = _read_stats(run_dir.path), run_dir.trained_images / 1000
    at = max(float(lines[-1]["Progress/kimg"]) if lines else 0.0, seen)  # it may have been stopped between two lines
    owner = _lock_owner(run_dir)
    state = f"trained by {owner}" if owner else "complete" if seen >= round(kimg, 6) else "stopped"
    pace = f", {lines[-1].get('Timing/img_per_sec', 0):,.0f} img/s" if lines and owner else ""
    told = f"{_format_scores(run_dir.path)}{_format_best_and_findings(run_dir.path)}"
    return f"{run_dir.path}: {state}, {at:g} of {kimg:g} kimg{pace}, checkpoint at {seen:g} kimg{told}"


def _read_stats(folder: Path) -> list[Row]:
    """Lines that say how far a run had come, as ours do."""
    return [row for row in read_jsonl(folder / "stats.jsonl") if is_number(row.get("Progress/kimg"))]


def _format_best_and_findings(folder: Path) -> str:
    """The best model, and what was found wrong."""
    best, wrong = read_best(folder), read_jsonl(folder / "health.jsonl")
    kept = f"; best {best['name']} {best['value']:.4g} at {best['kimg']:g} kimg" if best else ""
    shown = newest_scores(read_jsonl(folder / "metrics.jsonl")).get(best["name"]) if best else None
    if best and shown and shown.get("fingerprint") != best["fingerprint"]:
        kept += " (of scores that were taken otherwise)"
    return kept + "".join(f"; {row['action']} at {row['kimg']:g} kimg: {row['kind']}" for row in wrong)


def _lock_owner(run_dir: RunDir) -> str:
    """Who is writing in a folder, empty if nobody is."""
    try:
        with (run_dir.path / ".lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return ""
    except FileNotFoundError:
        return ""
    except OSError:
        return run_dir.lock_owner()


def _format_labels(folder: Path, run: Run) -> Iterator[str]:
    assert run.per_label is not None
    about = read_model_config(folder / "model")
    names, counts = [str(name) for name in about["classes"]], [int(count) for count in about["images"]]
    entries, now = LeaseQueue(folder / "queue", run.per_label.lease_s).entries(), _folder_time(folder)
    rows = [
        _format_label_row(folder, label, name, counts[label], entries.get(f"{label:04d}"), now, run.per_label.lease_s)
        for label, name in enumerate(names)
    ]
    widths = [max(len(row[column]) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    for row in (COLUMNS, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    states = [row[3].split(":")[0].split(",")[0] for row in rows]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    spent = sum(float(row[5] or 0) for row in rows)
    kimg = sum(float(row[4]) for row in rows)
    yield f"{folder}: {len(rows)} labels, {counted}; {kimg:g} of {run.kimg:g} kimg, {spent:.3g} minutes of training"
    if scores := _format_scores(folder):
        now_of = {job: entry.lease_number for job, entry in entries.items() if job != FINALIZE_JOB}
        stale = FINALIZE_JOB not in entries or entries[FINALIZE_JOB].metadata.get("of") != now_of
        yield f"all labels{' (before what was trained since)' if stale else ''}{scores}"


def _format_label_row(
    folder: Path, label: int, name: str, count: int, entry: LeaseEntry | None, now: float, lease_s: float
) -> tuple[str, ...]:
    under_way = entry and leased_label_dir(folder, label, entry.lease_number)
    lines = _read_stats(under_way) if under_way and entry and entry.state == "held" else []
    images = 1000 * float(lines[-1]["Progress/kimg"]) if lines else 0.0
    about: Mapping[str, Any] = entry.metadata if entry else {}
    kimg = max(images, float(about.get("images", about.get("from", 0)))) / 1000
    seconds = float(lines[-1].get("Timing/total_s", 0) if lines else about.get("seconds", 0))
    scores = "  ".join(f"{key} {value:.3g}" for key, value in about.get("scores", {}).items())
    state = _format_state(entry, now, lease_s)
    who = entry.worker if entry and state not in ("waiting", "replaced") else str(about.get("replaced", ""))
    return (str(label), name, f"{count:,}", state, f"{kimg:g}", f"{seconds / 60:.2f}" if seconds else "", who, scores)


def _format_state(entry: LeaseEntry | None, now: float, lease_s: float) -> str:
    if entry is None or "again" in entry.metadata:
        return "waiting"
    if entry.state == "held":
        silent = now - entry.heartbeat_ns / 1e9
        if is_process_gone(entry.metadata.get("process")):
            return "lost, to be taken over"
        return "training" if silent < lease_s else f"silent, for {silent:.0f} s"
    reason = f": {entry.metadata.get('reason', '')}"[:60] if entry.state == "failed" else ""
    if "replaced" in entry.metadata:
        return "replaced"
    return {"free": "stopped", "done": "done", "failed": "failed"}[entry.state] + reason


def _folder_time(folder: Path) -> float:
    """The time by the clock that gives the folder's files theirs; ours where nothing can be written there."""
    mark = folder / f".now-{secrets.token_hex(8)}"
    try:
        mark.touch()
        now = mark.stat().st_mtime
        mark.unlink()
        return now
    except OSError:
        return time.time()


def _format_scores(folder: Path) -> str:
    scores = format_scores(read_jsonl(folder / "metrics.jsonl"))
    return f": {scores}" if scores else ""
