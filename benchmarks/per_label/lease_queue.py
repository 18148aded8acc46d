"""Many workers and many labels at the queue of `--strategy per-label`, with emulated compute (see labels.py).

Real: `labels.Worker` with its `work`, `next`, `take` and `train`, the leases with their heartbeats, the record in every
label's folder, the part that is put into the merged model; each worker is a process, all in one folder.
Emulated: playing a label's game is a sleep, as long as the game has images; the part is a file of random bytes; a label
leaves no checkpoints, so `take` finds none; what is made of all labels together is left out.

So many workers share the cores of one machine here, and wait for each other where real ones would not: the share of the
queue in wall clock is an upper bound, and beside it stands the processor time that it took.
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
from paragan.config.run import Run
from paragan.core.schema import build, override, plain
from paragan.data.dataset import Images
from paragan.models.model import put_part
from paragan.recipes.digits import digits
from paragan.train.console import Screen
from paragan.train.per_label.jobs import Job, jobs
from paragan.train.per_label.worker import POLL_S, Worker
from paragan.train.run_dir import RunFolder

COUNTS = {"median": 20.0, "sigma": 1.0, "least": 4}  # images of a label: lognormal
IMAGES_EACH = 100  # that are shown for every image there is
PARTS = ("next", "take", "end")
COLUMNS = ("order", "makespan s", "efficiency", "idle tail s", "tail share")


@dataclass
class Timed(Worker):
    """A worker that sleeps instead of playing, and notes where its time goes.

    pace  : seconds an image
    spans : (began, ended) of every label's emulated compute
    spent : seconds in each part of the queue's work
    cpu_s : processor time of all of them
    left  : since when it has found nothing to take
    """

    pace: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    cpu_s: float = 0.0
    put_s: float = 0.0
    left: float | None = None
    polls: int = 0

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start, cpu, inside = time.monotonic(), time.thread_time(), sum(self.spent.values())
        yield
        self.spent[part] += time.monotonic() - start - (sum(self.spent.values()) - inside)
        self.cpu_s += (time.thread_time() - cpu) * (part != "take")  # which is a part of next

    def next(self) -> str:
        with self.timed("next"):
            name = super().next()
        if name not in self.named:
            self.left, self.polls = self.left or time.monotonic(), self.polls + 1
        return name

    def take(self, job: Job, entry: Any) -> bool:
        with self.timed("take"):
            return super().take(job, entry)

    def play(self, job: Job, folder: RunFolder) -> str:
        began = time.monotonic()
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_record(job.run)
        written = time.monotonic()
        time.sleep(self.pace * job.run.images)
        self.spans.append((written, ended := time.monotonic()))
        assert self.lease
        with self.timed("end"):
            ours = self.lease.look()
        if not ours:
            return ""
        start = time.monotonic()
        put_part(self.folder / "model", job.label, self.folder / "made")
        self.put_s += written - began + time.monotonic() - start
        with self.timed("end"):
            seconds = round(ended - written, 3)
            self.lease.end("done", images=job.run.images, seconds=seconds, scores={"fd_pixels": 10.0})
        return ""

    def conclude(self) -> None:
        assert self.lease
        with self.lease as lease:
            lease.end("done")

    def told(self) -> dict[str, Any]:
        about = {"spans": self.spans, "spent": self.spent, "cpu_s": self.cpu_s, "put_s": self.put_s}
        return {**about, "left": self.left, "polls": self.polls}


def long_tailed(labels: int) -> Images:
    """So many labels with as many images each as a lognormal draw says; no pixels worth looking at."""
    drawn = np.random.default_rng(0).lognormal(np.log(COUNTS["median"]), COUNTS["sigma"], labels)
    counts = np.maximum(drawn.astype(np.int64), int(COUNTS["least"]))
    of = np.repeat(np.arange(labels), counts)
    return Images(np.zeros((len(of), 8, 8, 1), np.uint8), of, tuple(map(str, range(labels))), "emulated")


def a_run(images: Images) -> Run:
    """Whose labels get their share of the data, longest first."""
    kimg = len(images.images) * IMAGES_EACH / 1000
    asked = {"strategy": "per-label", "strategy.share": "data", "strategy.rare": "0", "batch": "8", "kimg": str(kimg)}
    return build(Run, override(plain(digits()), list(asked.items())))


def measure(workers: int, labels: int, seconds: float, model_kb: int, where: str | None) -> dict[str, Any]:
    """Let them work, and say where the time went. seconds: a label, in the mean; where: on what file system."""
    images = long_tailed(labels)
    run = a_run(images)
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder = Path(name)
        (folder / "made").mkdir()
        (folder / "made" / "model.safetensors").write_bytes(os.urandom(1024 * model_kb))
        (folder / "made" / "config.json").write_text("{}")
        found = jobs(run, images, folder)
        pace = seconds * labels / sum(job.run.images for job in found)
        answers, barrier = context.SimpleQueue(), context.Barrier(workers)

        def work() -> None:
            worker = Timed(run, images, found, folder, World.solo(), Screen(False), pace=pace)
            barrier.wait()
            began = time.monotonic()
            worker.work()
            answers.put({"began": began, "ended": time.monotonic(), **worker.told()})

        processes = [context.Process(target=work, daemon=True) for _ in range(workers)]
        for process in processes:
            process.start()
        told = [answers.get() for _ in processes]
        for process in processes:
            process.join()
        files = [path.name for path in (folder / "queue").iterdir()]
    assert len(files) == labels + 1, f"{len(files)} leases of {labels} labels: some were taken twice"
    times = {job.label: pace * job.run.images for job in found}
    return {"labels": labels, "poll_s": POLL_S, **summary(told, times), "simulated": simulated(times, workers)}


def summary(told: Sequence[Mapping[str, Any]], times: Mapping[int, float]) -> dict[str, Any]:
    """What all workers say together, in seconds of wall clock or of all workers' time."""
    began, done = min(t["began"] for t in told), max(end for t in told for _, end in t["spans"])
    first_left = min([t["left"] for t in told if t["left"]] + [done])
    spent = {part: sum(t["spent"][part] for t in told) for part in told[0]["spent"]}
    makespan, all_s = done - began, sum(t["ended"] - t["began"] for t in told)
    idle = sum(max(0.0, done - t["left"]) for t in told if t["left"])
    work = sum(times.values())
    return {
        "workers": len(told),
        "label_s": {"mean": work / len(times), "least": min(times.values()), "most": max(times.values())},
        "makespan_s": makespan,
        "work_s": work,
        "efficiency": work / (len(told) * makespan),
        "slept_s": sum(end - start for t in told for start, end in t["spans"]),
        "all_began_s": max(t["spans"][0][0] for t in told if t["spans"]) - began,
        "queue_s": spent,
        "queue_share": sum(spent.values()) / all_s,
        "queue_cpu_share": sum(t["cpu_s"] for t in told) / all_s,
        "queue_cpu_ms_a_label": 1000 * sum(t["cpu_s"] for t in told) / len(times),
        "put_s": sum(t["put_s"] for t in told),
        "polls": sum(t["polls"] for t in told),
        "tail_s": done - first_left,
        "tail_share": (done - first_left) / makespan,
        "idle_share": idle / (len(told) * makespan),
        "all_away_s": max(t["ended"] for t in told) - done,
    }


def simulated(times: Mapping[int, float], workers: int) -> dict[str, Any]:
    """List scheduling without any overhead: whoever is free takes the next of the list."""
    orders = {
        "longest first": sorted(times.values(), reverse=True),
        "label order": [times[label] for label in sorted(times)],
        "shortest first": sorted(times.values()),
    }
    return {name: listed(order, workers) for name, order in orders.items()}


def listed(order: Sequence[float], workers: int) -> dict[str, float]:
    free = [0.0] * workers
    for seconds in order:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    makespan, tail = max(free), max(free) - min(free)
    share = tail / makespan
    return {
        "makespan_s": makespan,
        "efficiency": sum(order) / (workers * makespan),
        "tail_s": tail,
        "tail_share": share,
    }


def lines(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """What was measured beside what was simulated."""
    rows = {"measured": found} | {f"simulated, {name}": row for name, row in found["simulated"].items()}
    return [
        (
            name,
            *(f"{row['makespan_s']:.2f}", f"{row['efficiency']:.1%}"),
            *(f"{row['tail_s']:.2f}", f"{row['tail_share']:.1%}"),
        )
        for name, row in rows.items()
    ]
