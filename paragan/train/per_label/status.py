"""Describe what a run is doing, or each of its labels: read from its folder, without locking it (`paragan status`).

Needs no torch.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paragan.core.errors import UsageError
from paragan.core.folder_lock import lock_owner
from paragan.core.jsonl import Row, format_scores, is_number, newest_scores, read_jsonl
from paragan.core.schema import read_yaml
from paragan.models.model_config import read_model_config
from paragan.report.labels import finite_scores
from paragan.report.run_data import read_events
from paragan.train.best_record import read_best
from paragan.train.per_label.label_dirs import leased_label_dir
from paragan.train.per_label.lease_queue import FINALIZE_JOB, LeaseEntry, LeaseQueue, is_process_gone
from paragan.train.run_dir import RunDir, require_run_dir

COLUMNS = ("label", "class", "images", "state", "kimg", "minutes", "worker", "scores")


def format_status(path: Path, name: str) -> str:
    """Return the lines that describe a run folder.

    Args:
        name: what the user calls it, where `path` is a copy.

    Raises:
        UsageError: it is no run folder.
    """
    folder = require_run_dir(path)
    record = read_yaml(folder / "run.yaml")
    kimg = record.get("kimg", 0)
    if not is_number(kimg):
        raise UsageError(f"{folder / 'run.yaml'}: kimg={kimg!r} is no number: not a run of paragan")
    kimg = float(kimg)
    strategy = record.get("strategy")
    if isinstance(strategy, Mapping) and is_number(strategy.get("lease_s")):  # of a per-label run alone
        return "\n".join(_format_labels(folder, kimg, float(strategy["lease_s"]), name))
    return _format_run(RunDir(folder), kimg, name)


def _format_run(run_dir: RunDir, kimg: float, name: str) -> str:
    rows = _read_stats(run_dir.path)
    saved_kimg = run_dir.trained_images / 1000
    current_kimg = max(float(rows[-1]["Progress/kimg"]) if rows else 0.0, saved_kimg)  # it may be between two lines
    owner = _owner(run_dir.path)
    if owner:
        state = f"trained by {owner}"
    elif saved_kimg >= round(kimg, 6):
        state = "complete"
    else:
        state = "stopped"
    speed = rows[-1].get("Timing/img_per_sec") if rows else None
    rate = f", {speed:,.0f} img/s" if owner and is_number(speed) else ""
    saved = f"checkpoint at {saved_kimg:g} kimg" if saved_kimg else "no checkpoint yet"
    text = f"{name}: {state}, {current_kimg:g} of {kimg:g} kimg{rate}, {saved}"
    return text + _format_scores(run_dir.path) + _format_best_and_findings(run_dir.path)


def _read_stats(folder: Path) -> list[Row]:
    """Return the lines of stats.jsonl that say how far the run was."""
    return [row for row in read_jsonl(folder / "stats.jsonl") if is_number(row.get("Progress/kimg"))]


def _format_best_and_findings(folder: Path) -> str:
    """Describe the best model, and what was found wrong."""
    text = ""
    best = read_best(folder)
    if best:
        text += f"; best {best['name']} {best['value']:.4g} at {best['kimg']:g} kimg"
        newest = newest_scores(read_jsonl(folder / "metrics.jsonl")).get(best["name"])
        if newest and newest.get("fingerprint") != best["fingerprint"]:
            text += " (measured by another protocol)"
    for event in read_events(folder):
        text += f"; {event.action} at {event.kimg:g} kimg: {event.kind}"
    return text


def _owner(folder: Path) -> str:
    """Return who is writing in a folder; "" if no process is. A copy from an object store has owner.json instead."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        owner = json.loads((folder / "owner.json").read_text()).get("owner")
        return f"{owner} (if it is alive)" if owner else ""
    return lock_owner(folder)


def _format_labels(folder: Path, total_kimg: float, lease_s: float, run_name: str) -> Iterator[str]:
    """Yield a table with a line for each label, and a summary."""
    names, counts = _read_labels(folder)
    entries = LeaseQueue(folder / "queue", lease_s).entries()
    now = _folder_time(folder)
    rows = [
        _format_label_row(folder, label, name, count, entries.get(f"{label:04d}"), now, lease_s)
        for label, (name, count) in enumerate(zip(names, counts))
    ]
    widths = [max(len(row[column]) for row in (COLUMNS, *rows)) for column in range(len(COLUMNS))]
    for row in (COLUMNS, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
    states = [row[3].split(":")[0].split(",")[0] for row in rows]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    minutes = sum(float(row[5] or 0) for row in rows)
    kimg = sum(float(row[4]) for row in rows)
    progress = f"{kimg:g} of {total_kimg:g} kimg, {minutes:.3g} minutes of training"
    yield f"{run_name}: {len(rows)} labels, {counted}; {progress}"
    scores = _format_scores(folder)
    if scores:
        lease_numbers = {job: entry.lease_number for job, entry in entries.items() if job != FINALIZE_JOB}
        last = entries.get(FINALIZE_JOB)
        is_current = last is not None and last.metadata.get("of") == lease_numbers
        yield f"all labels{'' if is_current else ' (before what was trained since)'}{scores}"


def _read_labels(folder: Path) -> tuple[list[str], list[int]]:
    """Return the names of the labels, and their numbers of images."""
    config = read_model_config(folder / "model")
    try:
        names = [str(name) for name in config["classes"]]
        counts = [int(count) for count in config["images"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{folder / 'model' / 'config.json'} cannot be read: {error!r}") from error
    if len(names) != len(counts):
        raise UsageError(f"{folder / 'model' / 'config.json'}: {len(names)} classes, but images of {len(counts)}")
    return names, counts


def _format_label_row(
    folder: Path, label: int, name: str, count: int, entry: LeaseEntry | None, now: float, lease_s: float
) -> tuple[str, ...]:
    """Return the cells of a label, in the order of COLUMNS."""
    rows: list[Row] = []
    if entry and entry.state == "held":
        rows = _read_stats(leased_label_dir(folder, label, entry.lease_number))
    metadata: Mapping[str, Any] = entry.metadata if entry else {}
    images = 1000 * float(rows[-1]["Progress/kimg"]) if rows else 0.0
    kimg = max(images, float(metadata.get("images", metadata.get("from", 0)))) / 1000
    total_s = rows[-1].get("Timing/total_s") if rows else metadata.get("seconds")
    seconds = float(total_s) if is_number(total_s) else 0.0
    minutes = f"{seconds / 60:.2f}" if seconds else ""
    scores = "  ".join(f"{key} {value:.3g}" for key, value in finite_scores(metadata.get("scores")).items())
    state = _format_state(entry, now, lease_s)
    worker = str(metadata.get("replaced", ""))
    if entry and state not in ("waiting", "replaced"):
        worker = entry.worker
    return (str(label), name, f"{count:,}", state, f"{kimg:g}", minutes, worker, scores)


def _format_state(entry: LeaseEntry | None, now: float, lease_s: float) -> str:
    if entry is None or "retrain_seed" in entry.metadata:
        return "waiting"
    if entry.state == "held":
        silent_s = now - entry.heartbeat_ns / 1e9
        if is_process_gone(entry.metadata.get("process")):
            return "lost, to be taken over"
        return "training" if silent_s < lease_s else f"silent, for {silent_s:.0f} s"
    if "replaced" in entry.metadata:
        return "replaced"
    if entry.state == "failed":
        return "failed" + f": {entry.metadata.get('reason', '')}"[:60]
    return "stopped" if entry.state == "free" else entry.state


def _folder_time(folder: Path) -> float:
    """Return the time of the clock that stamps files in a folder; of this host if nothing can be written there."""
    probe = folder / f".now-{secrets.token_hex(8)}"
    try:
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now
    except OSError:
        return time.time()


def _format_scores(folder: Path) -> str:
    scores = format_scores(read_jsonl(folder / "metrics.jsonl"))
    return f": {scores}" if scores else ""
