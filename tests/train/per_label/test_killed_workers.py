"""Workers of a per-label run are killed at random moments: every label is done once, with the same result."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paragan.core.jsonl import read_jsonl
from paragan.models.model import load_model
from paragan.models.per_label_layout import label_dir
from processes import CliProcess, CliProcesses, final_tensors, logged_steps, train_args, wait_until

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900 if "PARAGAN_SOAK" in os.environ else 300)]

KILLS, STEPS = (20, 72) if "PARAGAN_SOAK" in os.environ else (3, 24)  # steps: of a label
LABELS = 10
SETTINGS = (
    *("--strategy=per-label", "--lanes=1", f"--kimg={0.016 * LABELS * STEPS:g}"),
    *("--output.tick_kimg=0.16", "--output.checkpoint_kimg=1.28", "--output.fakes_kimg=0"),  # every step; every 8th
)
# reports and figures take half of the time
NO_REPORT = "from paragan.train import trainer\ntrainer.write_report = trainer.make_final_figures = lambda *_: None"


def labels(run: Path) -> list[Path]:
    """The runs of the labels."""
    return [label_dir(run / "labels", label) for label in range(LABELS)]


def leases(run: Path, job: str) -> list[dict[str, Any]]:
    """All leases of a job, oldest first."""
    files = sorted((run / "queue").glob(f"{job}.*.json"), key=lambda file: int(file.name.split(".")[1]))
    return [json.loads(file.read_text()) for file in files]


def held_job(run: Path, worker: CliProcess) -> str:
    """The job that a worker holds, or ""."""
    jobs = [f"{label:04d}" for label in range(LABELS)]
    last = {job: leases(run, job)[-1] for job in jobs if leases(run, job)}
    held = [job for job, it in last.items() if it["state"] == "held" and it["process"][2] == str(worker.pid)]
    return held[0] if held else ""


def total_steps(run: Path) -> int:
    """Steps of all labels, in finished folders (0003) and leased ones (0003.2)."""
    return sum((logged_steps(label) or [0])[-1] for label in (run / "labels").glob("*"))


def start(run: Path, processes: CliProcesses) -> CliProcess:
    """A worker."""
    return processes.start_forked(*train_args(run, *SETTINGS), patch=NO_REPORT)


def kill_and_start(run: Path, processes: CliProcesses, draw: random.Random) -> list[CliProcess]:
    """Start two workers, and kill and replace one at random steps. Returns the last two."""
    workers = [start(run, processes) for _ in range(2)]
    moments = sorted(draw.randrange(LABELS * STEPS * 9 // 10) for _ in range(KILLS))
    for moment in moments:
        wait_until(lambda m=moment: total_steps(run) >= m, description=f"step {moment}")
        victim = draw.randrange(2)
        wait_until(lambda v=victim: held_job(run, workers[v]), description="it has a label")
        time.sleep(0.2 * draw.random())
        workers[victim].send_signal(signal.SIGKILL)
        workers[victim].wait()
        workers[victim] = start(run, processes)
    return workers


@pytest.mark.slow
def test_killed_workers_change_no_label(tmp_path, processes):
    uninterrupted, run = tmp_path / "calm", tmp_path / "run"
    assert [worker.wait(600) for worker in [start(uninterrupted, processes) for _ in range(2)]] == [0, 0]
    workers = kill_and_start(run, processes, random.Random(0))
    assert [worker.wait(600) for worker in workers] == [0, 0], [worker.err for worker in workers]
    job_leases = [leases(run, job) for job in (*(f"{label:04d}" for label in range(LABELS)), "all")]
    assert [[lease["state"] for lease in of].count("done") for of in job_leases] == [1] * len(job_leases)
    assert {of[-1]["state"] for of in job_leases} == {"done"}
    assert sum(map(len, job_leases)) > len(job_leases)  # some were killed with a label
    assert [of[-1]["images"] for of in job_leases[:-1]] == [16 * STEPS] * LABELS
    for mine, expected in zip(labels(run), labels(uninterrupted)):
        assert logged_steps(mine) == logged_steps(expected) == list(range(1, STEPS + 1))
        assert final_tensors(mine) == final_tensors(expected)
    labels_of_samples = np.repeat(np.arange(LABELS), 3)
    of_both = [
        load_model(folder).sampler.images(range(len(labels_of_samples)), labels_of_samples)
        for folder in (run, uninterrupted)
    ]
    assert (of_both[0] == of_both[1]).all()
    scores = [read_jsonl(folder / "metrics.jsonl") for folder in (run, uninterrupted)]
    assert [row["value"] for row in scores[0]] == [row["value"] for row in scores[1]]


KILL_IN_FINALIZE = """
import os, signal
from paragan.train.per_label import finalize
finalize.draw_fakes = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_during_finalize_leaves_no_score_twice(tmp_path, processes):
    run = tmp_path / "run"
    short = (*train_args(run, *SETTINGS), f"--kimg={0.016 * LABELS:g}")
    assert processes.start_forked(*short, patch=f"{NO_REPORT}\n{KILL_IN_FINALIZE}").wait() == -signal.SIGKILL
    assert [row["name"] for row in read_jsonl(run / "metrics.jsonl")] == ["fd_pixels"]
    worker = processes.start_forked(*short, patch=NO_REPORT)
    assert worker.wait() == 0, worker.err
    assert [row["name"] for row in read_jsonl(run / "metrics.jsonl")] == ["fd_pixels"]
    assert [lease["state"] for lease in leases(run, "all")] == ["held", "done"]
