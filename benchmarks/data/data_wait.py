"""How long a training step waits for its data: one contestant in a process of its own, watched from outside.

The accelerator is emulated: a step takes a fixed time and leaves the processor free; or it is a small network that
really learns, on the same cores. The clock, and with it the schedule of bursts, starts after a few batches that are
reported apart.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import loaders
from benchmarks.data.congested_server import Bursts, CongestedServer
from benchmarks.data.make_shards import Shards

SAMPLE_S, MEMORY_S, WARM_UP = 0.25, 1.0, 4  # WARM_UP: batches
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ContestOptions:
    """What every contestant plays."""

    seconds: float
    step_ms: float
    real: bool
    bursts: Bursts


def measure_contestant(
    name: str, options: dict[str, int], server: CongestedServer, shards: Shards, play: ContestOptions
) -> dict[str, Any]:
    """Let a contestant play, and say what it took."""
    context = multiprocessing.get_context("spawn")
    local, remote = context.Pipe()
    server.restart(())
    child = context.Process(target=_contestant_main, args=(name, options, server.url, shards, play, remote))
    child.start()
    remote.close()
    try:
        assert child.pid is not None
        _receive(local)  # imported
        memory = PeakProcessMemory(child.pid)
        start_s = _receive(local)  # warmed up
        server.restart(play.bursts)
        local.send("go")
        cpu, timeline = cpu_s(child.pid), _record_timeline(server, local, memory)
        result = local.recv()
        used = cpu_s(child.pid) - cpu
        local.send("end")
    finally:
        child.join(20)
        child.kill()
    return {
        **_summarize(result, play),
        "start_s": start_s,
        "cpu_s": used,
        "memory_mb": memory.peak,
        "timeline": timeline,
    }


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(300):
        raise SystemExit("a contestant does not answer")
    return pipe.recv()


def _record_timeline(server: CongestedServer, pipe: Connection, memory: PeakProcessMemory) -> list[dict[str, Any]]:
    """What the server sees of it, until the contestant is done."""
    begin, rows = time.perf_counter(), []
    while not pipe.poll(max(0.0, SAMPLE_S * (len(rows) + 1) - (time.perf_counter() - begin))):
        rows.append({"s": round(time.perf_counter() - begin, 2), **server.stats()})
        if len(rows) % round(MEMORY_S / SAMPLE_S) == 0:
            memory.sample()
    return rows


def _summarize(result: dict[str, Any], play: ContestOptions) -> dict[str, Any]:
    waits = result["waits"]  # (begin, seconds) each
    seconds = [wait for _, wait in waits]
    ordered, end = sorted(seconds), play.seconds
    inside = sum(max(0.0, min(b + w, stop) - max(b, start)) for b, w in waits for start, stop in play.bursts)
    congested = sum(min(stop, end) - start for start, stop in play.bursts if start < end)
    opening = min([end, *(start for start, _ in play.bursts)])
    return {
        "share": sum(seconds) / end,
        "share_before_bursts": sum(min(w, opening - b) for b, w in waits if b < opening) / opening,
        "share_in_bursts": inside / congested if congested else None,
        "share_between": (sum(seconds) - inside) / (end - congested),
        "wait_ms": {
            "p50": 1000 * statistics.median(ordered),
            "p99": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
            "max": 1000 * ordered[-1],
        },
        "images_s": loaders.BATCH * len(waits) / end,
        **result,
    }


# In the contestant's process ------------------------------------------------------------------------------


def _contestant_main(
    name: str, options: dict[str, int], where: str, shards: Shards, play: ContestOptions, pipe: Connection
) -> None:
    multiprocessing.set_start_method("fork", force=True)  # as in a process that nobody spawned: DataLoader's default
    warnings.simplefilter("ignore")  # DataLoader's, of more workers than cores
    step = _real_step() if play.real else _emulated_step(play.step_ms / 1000)
    pipe.send("imported")
    begin = time.perf_counter()
    feed = loaders.CONTESTANTS[name](where, shards, **options)
    for _ in range(WARM_UP):
        batch = next(feed.batches)
        loaders.check_batch(batch, shards.resolution)
        step(*batch)
    pipe.send(time.perf_counter() - begin)
    pipe.recv()
    with FeedGauges(feed) as gauges:
        waits = _measure_waits(feed, step, play.seconds)
    pipe.send({"waits": waits, "gauges": gauges.rows})
    pipe.recv()
    feed.close()


def _measure_waits(
    feed: loaders.Feed, step: Callable[[Tensor, Tensor], object], seconds: float
) -> list[tuple[float, float]]:
    """(begin, seconds) of each wait, cut at the end."""
    waits, zero = [], time.perf_counter()
    while (begin := time.perf_counter() - zero) < seconds:
        batch = next(feed.batches)
        wait = min(time.perf_counter() - zero, seconds) - begin
        waits.append((round(begin, 4), round(wait, 5)))
        step(*batch)
    return waits


def _emulated_step(seconds: float) -> Callable[[Tensor, Tensor], object]:
    return lambda images, labels: time.sleep(seconds)


def _real_step() -> Callable[[Tensor, Tensor], object]:
    """A small discriminator learns that the images are real, in float32 on all cores."""
    widths = (3, 32, 64, 128)
    layers: list[torch.nn.Module] = []
    for i, o in itertools.pairwise(widths):
        layers += [torch.nn.Conv2d(i, o, 4, 2, 1), torch.nn.LeakyReLU(0.2)]
    net = torch.nn.Sequential(*layers, torch.nn.Conv2d(widths[-1], 1, 8))
    optimizer = torch.optim.Adam(net.parameters())

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        torch.nn.functional.softplus(-net(images)).mean().backward()
        optimizer.step()

    return step


class FeedGauges:
    """What a feed says of itself, a row every SAMPLE_S."""

    def __init__(self, feed: loaders.Feed):
        self.feed, self.rows, self._end = feed, [], threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> FeedGauges:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        begin = time.perf_counter()
        while not self._end.wait(max(0.0, SAMPLE_S * (len(self.rows) + 1) - (time.perf_counter() - begin))):
            at = round(time.perf_counter() - begin, 2)
            self.rows.append({"s": at, "ready": self.feed.ready(), "workers": self.feed.workers()})


# Processes ------------------------------------------------------------------------------------------------


class PeakProcessMemory:
    """MB that a process and its children take above what they took at first.

    Anonymous pages by their share (PSS) and shared memory; not pages of files, such as libraries, that the machine
    holds once for all. Shared memory is counted for the whole machine, on which nothing else should run: batches in
    DataLoader's queues are mapped by nobody until they are received, so that no process's account has them.
    """

    def __init__(self, pid: int):
        self.pid, self.peak = pid, 0.0
        self._first = self._resident_kb()

    def sample(self) -> None:
        self.peak = max(self.peak, (self._resident_kb() - self._first) / 1000)

    def _resident_kb(self) -> int:
        total = _read_kb(Path("/proc/meminfo"), "Shmem")
        for pid in process_tree(self.pid):
            total += _read_kb(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon")
        return total  # kB


def _read_kb(path: Path, name: str) -> int:
    """A line of a file of /proc; 0 where the process has just ended."""
    try:
        return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 0


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and its children, ended ones included."""
    total = 0
    for one in process_tree(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(ticks) for ticks in fields[11:15])
    return total / TICK


def process_tree(pid: int) -> list[int]:
    """A process and all that it started."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(one for child in children for one in process_tree(child))]
