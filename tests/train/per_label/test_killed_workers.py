"""Workers of a run per label are killed at random moments: every label is done once, as if nobody had been."""

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
from paragan.models.model import label_dir, load_model
from processes import CliProcess, CliProcesses, final_tensors, logged_steps, train_args, wait_until

pytestmark = [pytest.mark.kill, pytest.mark.timeout(900 if "PARAGAN_SOAK" in os.environ else 240)]

KILLS, STEPS = (20, 72) if "PARAGAN_SOAK" in os.environ else (3, 24)  # steps: of a label
LABELS = 10
SETTINGS = (
    *("--strategy=per-label", "--lanes=1", f"--kimg={0.016 * LABELS * STEPS:g}"),
    *("--output.tick_kimg=0.16", "--output.checkpoint_kimg=1.28", "--output.fakes_kimg=0"),  # every step; every 8th
)
NO_PAGES = (
    "from paragan.train import start\nstart.write_report = start.at_end = lambda *_: None"  # they take half of the time
)


def labels(run: Path) -> list[Path]:
    """The runs of the labels."""
    return [label_dir(run / "labels", label) for label in range(LABELS)]


def leases(run: Path, job: str) -> list[dict[str, Any]]:
    """All that ever were of a job, in their order."""
    files = sorted((run / "queue").glob(f"{job}.*.json"), key=lambda file: int(file.name.split(".")[1]))
    return [json.loads(file.read_text()) for file in files]


def holds(run: Path, worker: CliProcess) -> str:
    """The job that a worker has now, or nothing."""
    jobs = [f"{label:04d}" for label in range(LABELS)]
    last = {job: leases(run, job)[-1] for job in jobs if leases(run, job)}
    mine = [job for job, it in last.items() if it["state"] == "held" and it["process"][2] == str(worker.pid)]
    return mine[0] if mine else ""


def came(run: Path) -> int:
    """How many steps all labels have come, wherever they now are (0003, or 0003.2 while it is trained)."""
    return sum((logged_steps(label) or [0])[-1] for label in (run / "labels").glob("*"))


def start(run: Path, processes: CliProcesses) -> CliProcess:
    """A worker."""
    return processes.start_forked(*train_args(run, *SETTINGS), patch=NO_PAGES)


def kill_and_start(run: Path, processes: CliProcesses, draw: random.Random) -> list[CliProcess]:
    """Two workers, one of which is killed whenever the run has come so far: the last two."""
    workers = [start(run, processes) for _ in range(2)]
    moments = sorted(draw.randrange(LABELS * STEPS * 9 // 10) for _ in range(KILLS))
    for moment in moments:
        wait_until(lambda m=moment: came(run) >= m, description=f"step {moment}")
        victim = draw.randrange(2)
        wait_until(lambda v=victim: holds(run, workers[v]), description="it has a label")
        time.sleep(0.2 * draw.random())
        workers[victim].send_signal(signal.SIGKILL)
        workers[victim].wait()
        workers[victim] = start(run, processes)
    return workers


def test_whoever_is_killed_every_label_is_done_once_and_as_if_nobody_was(tmp_path, processes):
    calm, run = tmp_path / "calm", tmp_path / "run"
    assert [worker.wait(600) for worker in [start(calm, processes) for _ in range(2)]] == [0, 0]
    workers = kill_and_start(run, processes, random.Random(0))
    assert [worker.wait(600) for worker in workers] == [0, 0], [worker.err for worker in workers]
    taken = [leases(run, job) for job in (*(f"{label:04d}" for label in range(LABELS)), "all")]
    assert [[lease["state"] for lease in of].count("done") for of in taken] == [1] * len(taken)
    assert {of[-1]["state"] for of in taken} == {"done"}
    assert sum(map(len, taken)) > len(taken)  # some were killed with a label
    assert [of[-1]["images"] for of in taken[:-1]] == [16 * STEPS] * LABELS
    for mine, theirs in zip(labels(run), labels(calm)):
        assert logged_steps(mine) == logged_steps(theirs) == list(range(1, STEPS + 1))
        assert final_tensors(mine) == final_tensors(theirs)
    wanted = np.repeat(np.arange(LABELS), 3)
    of_both = [load_model(folder).sampler.images(range(len(wanted)), wanted) for folder in (run, calm)]
    assert (of_both[0] == of_both[1]).all()
    scores = [read_jsonl(folder / "metrics.jsonl") for folder in (run, calm)]
    assert [row["value"] for row in scores[0]] == [row["value"] for row in scores[1]]


IN_THE_END = """
import os, signal
from paragan.train import pooled
pooled.draw_fakes = lambda *told: os.kill(os.getpid(), signal.SIGKILL)
"""


def test_who_is_killed_while_all_labels_are_scored_leaves_no_score_twice(tmp_path, processes):
    run = tmp_path / "run"
    short = (*train_args(run, *SETTINGS), f"--kimg={0.016 * LABELS:g}")
    assert processes.start_forked(*short, patch=f"{NO_PAGES}\n{IN_THE_END}").wait() == -signal.SIGKILL
    assert [row["name"] for row in read_jsonl(run / "metrics.jsonl")] == ["fd_pixels"]
    worker = processes.start_forked(*short, patch=NO_PAGES)
    assert worker.wait() == 0, worker.err
    assert [row["name"] for row in read_jsonl(run / "metrics.jsonl")] == ["fd_pixels"]
    assert [lease["state"] for lease in leases(run, "all")] == ["held", "done"]
