"""Train the digits per label by real commands: the pace of workers, and recovery after kills (see per_label.py)."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.timing import Spread
from paragan.config.run import Run
from paragan.core.jsonl import read_jsonl
from paragan.core.schema import from_dict, read_yaml
from paragan.models.model import load_model
from paragan.models.per_label_layout import label_dir
from paragan.train.per_label.lease_queue import LeaseQueue

LABELS = 10
BASE = ("digits", "--strategy=per-label", "--device.threads=1", "--evaluation.metrics=fd", "--evaluation.count=1000")
PACE_SETTINGS = BASE
KILL_SETTINGS = (
    *BASE,
    "--output.tick_kimg=1.28",  # a line of stats every step of a label
    "--output.checkpoint_kimg=12.8",  # every tenth
)
RATES = {
    "first lease to last label": "training_s",
    "start of the commands to their end": "wall_s",
    "within rounds": "rounds_s",
}


def start_worker(run: Path, settings: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a worker process."""
    command = [sys.executable, "-m", "paragan", "train", *settings, f"--run-dir={run}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def read_leases(run: Path, label: int) -> list[dict[str, Any]]:
    """Return all leases of a label, oldest first: their contents, and when they were written."""
    files = sorted((run / "queue").glob(f"{label:04d}.*.json"), key=lambda file: int(file.name.split(".")[1]))
    return [{"at": file.stat().st_mtime, **json.loads(file.read_text())} for file in files]


# Pace -------------------------------------------------------------------------------------------------


def measure_scaling(kimg: float, repetitions: int) -> Iterator[list[dict[str, Any]]]:
    """Measure one worker and two in turns. Yields the rows so far after each."""
    rows: list[dict[str, Any]] = []
    for repetition in range(repetitions):
        for workers in ((1, 2), (2, 1))[repetition % 2]:
            rows.append({"repetition": repetition, **measure_pace(workers, kimg)})
            yield rows


def measure_pace(workers: int, kimg: float) -> dict[str, Any]:
    """Train a run with `workers` workers and return its times and bytes."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        start = time.monotonic()
        status = [w.wait() for w in [start_worker(run, (*PACE_SETTINGS, f"--kimg={kimg}")) for _ in range(workers)]]
        wall_s = time.monotonic() - start
        if any(status):
            raise SystemExit(f"the workers ended with {status}")
        ended = [read_leases(run, label)[-1] for label in range(LABELS)]
        training_start = min((label_dir(run / "labels", label) / "run.yaml").stat().st_mtime for label in range(LABELS))
        lines = [
            line for label in range(LABELS) for line in read_jsonl(label_dir(run / "labels", label) / "stats.jsonl")
        ]
        return {
            "workers": workers,
            "images": sum(lease["images"] for lease in ended),
            "training_s": max(lease["at"] for lease in ended) - training_start,
            "wall_s": wall_s,
            "rounds_s": sum(lease["seconds"] for lease in ended) / workers,
            "sent_bytes": sum(v for line in lines for k, v in line.items() if k.startswith("Comm/")),
        }


def compare_pace(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare images per second of one and of two workers; ratios are formed within a repetition."""
    results: dict[str, Any] = {"sent_bytes": sum(row["sent_bytes"] for row in rows), "rates": {}}
    for name, seconds in RATES.items():
        by = {(r["repetition"], r["workers"]): r["images"] / r[seconds] for r in rows}
        pairs = [(one, by[n, 2]) for (n, workers), one in by.items() if workers == 1 and (n, 2) in by]
        if pairs:
            spreads = [Spread.from_values([one for one, _ in pairs]), Spread.from_values([two for _, two in pairs])]
            spreads.append(Spread.from_values([two / one for one, two in pairs]))
            results["rates"][name] = dict(zip(("1", "2", "ratio"), (spread.to_json() for spread in spreads)))
    return results


def format_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (name, *(f"{s['median']:.4g} [{s['ci95'][0]:.4g}, {s['ci95'][1]:.4g}]" for s in rates.values()))
        for name, rates in results["rates"].items()
    ]


# Kills ------------------------------------------------------------------------------------------------


def measure_kills(kills: int, kimg: float, every: float, seed: int) -> dict[str, Any]:
    """Kill one of two workers repeatedly, start another each time, and check the finished run."""
    settings = (*KILL_SETTINGS, f"--kimg={kimg}")
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        baseline = Path(name) / "baseline"
        start = time.monotonic()
        done: list[dict[str, Any]] = []
        workers = [start_worker(run, settings) for _ in range(2)]
        for number in range(kills):
            victim = rng.randrange(2)
            wait_for_a_label(run, workers[victim], number)
            time.sleep(rng.uniform(0, 2 * every))
            workers[victim].send_signal(signal.SIGSTOP)
            row = {
                "kill": number + 1,
                "second": round(time.monotonic() - start, 1),
                "at": current_activity(run, workers[victim]),
            }
            workers[victim].kill()
            workers[victim].wait()
            done.append(row)
            workers[victim] = start_worker(run, settings)
        status = [worker.wait() for worker in workers]
        wall_s = time.monotonic() - start
        baseline_status = [worker.wait() for worker in [start_worker(baseline, settings) for _ in range(2)]]
        if any(baseline_status):
            raise SystemExit(f"the workers of the baseline ended with {baseline_status}")
        checks = {"the last two workers ended with status 0": status == [0, 0], **check_finished_run(run, baseline)}
        leases_from = {label: [lease["from"] for lease in read_leases(run, label)] for label in range(LABELS)}
    about = {"settings": settings, "every_s": every, "seed": seed, "wall_s": wall_s}
    return {**about, "leases_from": leases_from, "kills": done, "checks": checks}


def wait_for_a_label(run: Path, worker: subprocess.Popen[bytes], kills: int) -> None:
    while not current_job(run, worker):
        if worker.poll() is not None:
            raise SystemExit(f"a worker ended after {kills} kills: give more --kimg, or a smaller --every")
        time.sleep(0.05)


def current_job(run: Path, worker: subprocess.Popen[bytes]) -> str:
    """Return the job that a worker holds, or ""."""
    entries = LeaseQueue(run / "queue", 60.0).entries().values()
    held = [e.job for e in entries if e.state == "held" and e.metadata["process"][2] == str(worker.pid)]
    return held[0] if held else ""


def current_activity(run: Path, worker: subprocess.Popen[bytes]) -> str:
    """Describe what a worker is doing."""
    job = current_job(run, worker)
    inside = next((run / "labels").glob(f"{job}*"), None) if job else None
    rows = read_jsonl(inside / "stats.jsonl") if inside else []
    where = f", step {rows[-1]['Progress/step']:g}" if rows else ""
    return f"job {job}{where}" if job else "nothing"


def check_finished_run(run: Path, baseline: Path) -> dict[str, bool]:
    """Check a finished run against a baseline run without kills; return the result of each check."""
    of = range(LABELS)
    last = [read_leases(run, label)[-1] for label in of]
    games = [from_dict(Run, read_yaml(label_dir(run / "labels", label) / "run.yaml")) for label in of]
    steps = [
        [row["Progress/step"] for row in read_jsonl(label_dir(run / "labels", label) / "stats.jsonl")] for label in of
    ]
    labels = np.repeat(np.arange(LABELS), 4)
    indices = list(range(4 * LABELS))
    samples = [load_model(folder).sampler.images(indices, labels) for folder in (run, baseline)]
    return {
        "every label is done once, by its last lease": all(
            [lease["state"] for lease in read_leases(run, label)].count("done") == 1 and last[label]["state"] == "done"
            for label in of
        ),
        "every label has had its kimg": all(lease["images"] == game.total_images for lease, game in zip(last, games)),
        "no step of a label is missing or logged twice": all(
            logged == list(range(1, game.total_images // game.round_images + 1)) for logged, game in zip(steps, games)
        ),
        "the merged model samples every label, as the undisturbed": bool((samples[0] == samples[1]).all()),
        "every label's model is the undisturbed one, bit for bit": all(
            read_weights(run / "labels" / f"{label:04d}" / "model")
            == read_weights(baseline / "labels" / f"{label:04d}" / "model")
            and read_weights(label_dir(run / "model", label)) == read_weights(label_dir(baseline / "model", label))
            for label in of
        ),
    }


def read_weights(model: Path) -> bytes:
    return (model / "model.safetensors").read_bytes()
