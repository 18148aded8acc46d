"""Measure the queue of `--strategy per-label` with many workers and many labels, and emulated compute.

Real: `LabelWorker` with its `work`, `next_job`, `try_acquire` and `train_label`, the leases with their heartbeats, the
record in every label's folder, and the model file that is installed. Each worker is a process, all in one folder.
Emulated: training a label is a sleep in proportion to its images; its model is a file of random bytes; it leaves no
checkpoints, so `try_acquire` finds none; the last job does nothing.

All workers share the cores of one machine and wait for each other where real ones would not, so the queue's share of
the wall clock is an upper bound. Its processor time is printed beside it.
"""

from __future__ import annotations

import contextlib
import heapq
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paragan.comm.world import World
from paragan.config.run import Run, to_saved_dict
from paragan.core.schema import apply_overrides, from_dict, to_dict
from paragan.data.dataset import Dataset
from paragan.models.model import install_label_model
from paragan.recipes.digits import digits
from paragan.train.console import RunConsole
from paragan.train.per_label.jobs import Job, make_jobs
from paragan.train.per_label.worker import POLL_S, LabelWorker
from paragan.train.run_dir import RunDir

LABEL_SIZES = {"median": 20.0, "sigma": 1.0, "least": 4}  # images of a label: lognormal
PASSES = 100  # times that each image is used
QUEUE_STEPS = ("next", "take", "end")
COLUMNS = ("order", "makespan s", "efficiency", "idle tail s", "tail share")


@dataclass
class TimedWorker(LabelWorker):
    """A worker that sleeps instead of training, and measures where its time goes.

    s_per_image  : seconds of sleep for an image
    spans        : (start, end) of every label's emulated training
    step_s       : seconds in each part of the queue's work
    cpu_s        : processor time of all of them
    put_s        : seconds spent on records and model files
    idle_since_s : when it first got no job; None: not yet
    """

    s_per_image: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    step_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUEUE_STEPS, 0.0))
    cpu_s: float = 0.0
    put_s: float = 0.0
    idle_since_s: float | None = None
    polls: int = 0

    @contextlib.contextmanager
    def time_step(self, part: str) -> Iterator[None]:
        start = time.monotonic()
        cpu = time.thread_time()
        inside = sum(self.step_s.values())
        yield
        self.step_s[part] += time.monotonic() - start - (sum(self.step_s.values()) - inside)
        self.cpu_s += (time.thread_time() - cpu) * (part != "take")  # "take" is a part of "next"

    def next_job(self) -> str:
        with self.time_step("next"):
            name = super().next_job()
        if name not in self.jobs_by_name:
            self.idle_since_s = self.idle_since_s or time.monotonic()
            self.polls += 1
        return name

    def try_acquire(self, job: Job, entry: Any) -> bool:
        with self.time_step("take"):
            return super().try_acquire(job, entry)

    def train_to_end(self, job: Job, run_dir: RunDir) -> str:
        begin = time.monotonic()
        run_dir.path.mkdir(parents=True, exist_ok=True)
        run_dir.write_run_config(to_saved_dict(job.run))
        written = time.monotonic()
        time.sleep(self.s_per_image * job.run.total_images)
        self.spans.append((written, ended := time.monotonic()))
        assert self.lease
        with self.time_step("end"):
            is_owned = self.lease.is_owned()
        if not is_owned:
            return ""
        start = time.monotonic()
        install_label_model(self.folder / "model", job.label, self.folder / "made")
        self.put_s += written - begin + time.monotonic() - start
        with self.time_step("end"):
            seconds = round(ended - written, 3)
            self.lease.release("done", images=job.run.total_images, seconds=seconds, scores={"fd_pixels": 10.0})
        return ""

    def finalize(self) -> None:
        assert self.lease
        with self.lease as lease:
            lease.release("done")

    def report(self) -> dict[str, Any]:
        about = {"spans": self.spans, "spent": self.step_s, "cpu_s": self.cpu_s, "put_s": self.put_s}
        return {**about, "left": self.idle_since_s, "polls": self.polls}


def make_long_tailed(labels: int) -> Dataset:
    """Make a data set whose label sizes are lognormal; its pixels are all zero."""
    sizes = np.random.default_rng(0).lognormal(np.log(LABEL_SIZES["median"]), LABEL_SIZES["sigma"], labels)
    counts = np.maximum(sizes.astype(np.int64), int(LABEL_SIZES["least"]))
    image_labels = np.repeat(np.arange(labels), counts)
    pixels = np.zeros((len(image_labels), 8, 8, 1), np.uint8)
    return Dataset(pixels, image_labels, tuple(map(str, range(labels))), "emulated")


def make_run(images: Dataset) -> Run:
    """Make a run whose labels have budgets in proportion to their images."""
    kimg = len(images.images) * PASSES / 1000
    settings = {
        "strategy": "per-label",
        "strategy.budget_by": "data",
        "strategy.rare_below": "0",
        "batch": "8",
        "kimg": str(kimg),
    }
    return from_dict(Run, apply_overrides(to_dict(digits()), list(settings.items())))


def measure(workers: int, labels: int, seconds: float, model_kb: int, where: str | None) -> dict[str, Any]:
    """Run the workers and return where their time went.

    Args:
        workers: processes.
        labels: jobs of the queue.
        seconds: emulated training of a label, in the mean.
        model_kb: size of a label's model file.
        where: folder that the run folder is created in; None: the default of tempfile.
    """
    images = make_long_tailed(labels)
    run = make_run(images)
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder = Path(name)
        (folder / "made").mkdir()
        (folder / "made" / "model.safetensors").write_bytes(os.urandom(1024 * model_kb))
        (folder / "made" / "config.json").write_text("{}")
        jobs = make_jobs(run, images, folder)
        pace = seconds * labels / sum(job.run.total_images for job in jobs)
        answers = context.SimpleQueue()
        barrier = context.Barrier(workers)

        def work() -> None:
            worker = TimedWorker(run, images, jobs, folder, World.solo(), RunConsole(False), s_per_image=pace)
            barrier.wait()
            start = time.monotonic()
            worker.work()
            answers.put({"began": start, "ended": time.monotonic(), **worker.report()})

        processes = [context.Process(target=work, daemon=True) for _ in range(workers)]
        for process in processes:
            process.start()
        reports = [answers.get() for _ in processes]
        for process in processes:
            process.join()
        files = [path.name for path in (folder / "queue").iterdir()]
    assert len(files) == labels + 1, f"{len(files)} leases of {labels} labels: some were leased twice"
    times = {job.label: pace * job.run.total_images for job in jobs}
    return {
        "labels": labels,
        "poll_s": POLL_S,
        **summarize(reports, times),
        "simulated": simulate_schedules(times, workers),
    }


def summarize(reports: Sequence[Mapping[str, Any]], times: Mapping[int, float]) -> dict[str, Any]:
    """Sum the reports of all workers: wall-clock seconds, and shares of all workers' time."""
    first_start = min(t["began"] for t in reports)
    done = max(end for t in reports for _, end in t["spans"])
    first_left = min([t["left"] for t in reports if t["left"]] + [done])
    spent = {part: sum(t["spent"][part] for t in reports) for part in reports[0]["spent"]}
    makespan = done - first_start
    all_s = sum(t["ended"] - t["began"] for t in reports)
    idle = sum(max(0.0, done - t["left"]) for t in reports if t["left"])
    work = sum(times.values())
    return {
        "workers": len(reports),
        "label_s": {"mean": work / len(times), "least": min(times.values()), "most": max(times.values())},
        "makespan_s": makespan,
        "work_s": work,
        "efficiency": work / (len(reports) * makespan),
        "slept_s": sum(end - start for t in reports for start, end in t["spans"]),
        "all_began_s": max(t["spans"][0][0] for t in reports if t["spans"]) - first_start,
        "queue_s": spent,
        "queue_share": sum(spent.values()) / all_s,
        "queue_cpu_share": sum(t["cpu_s"] for t in reports) / all_s,
        "queue_cpu_ms_a_label": 1000 * sum(t["cpu_s"] for t in reports) / len(times),
        "put_s": sum(t["put_s"] for t in reports),
        "polls": sum(t["polls"] for t in reports),
        "tail_s": done - first_left,
        "tail_share": (done - first_left) / makespan,
        "idle_share": idle / (len(reports) * makespan),
        "all_away_s": max(t["ended"] for t in reports) - done,
    }


def simulate_schedules(times: Mapping[int, float], workers: int) -> dict[str, Any]:
    """Simulate list scheduling without overhead, for several orders: a free worker takes the next label."""
    orders = {
        "longest first": sorted(times.values(), reverse=True),
        "label order": [times[label] for label in sorted(times)],
        "shortest first": sorted(times.values()),
    }
    return {name: list_schedule(order, workers) for name, order in orders.items()}


def list_schedule(order: Sequence[float], workers: int) -> dict[str, float]:
    free = [0.0] * workers
    for seconds in order:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    makespan = max(free)
    tail = makespan - min(free)
    return {
        "makespan_s": makespan,
        "efficiency": sum(order) / (workers * makespan),
        "tail_s": tail,
        "tail_share": tail / makespan,
    }


def format_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return table rows: the measured schedule, then the simulated ones."""
    rows = {"measured": results} | {f"simulated, {name}": row for name, row in results["simulated"].items()}
    return [
        (
            name,
            *(f"{row['makespan_s']:.2f}", f"{row['efficiency']:.1%}"),
            *(f"{row['tail_s']:.2f}", f"{row['tail_share']:.1%}"),
        )
        for name, row in rows.items()
    ]
