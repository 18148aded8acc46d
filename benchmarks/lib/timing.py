"""Time contestants interleaved, compute ratios with their spread, and describe the machine: used by all benchmarks.

A shared or warming machine drifts by more than the differences that matter here. So contestants alternate in short
blocks, A B C, B C A, ...; ratios are formed within a round, where the drift affects both sides alike; and the result is
the median over rounds with its 95 % confidence interval.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
StepsFn = Callable[[int], None]  # runs n steps


@dataclass(frozen=True)
class Spread:
    """A median, its 95 % confidence interval (low, high), and the quartiles."""

    median: float
    low: float
    high: float
    quartiles: tuple[float, float]

    @staticmethod
    def from_values(values: Sequence[float]) -> Spread:
        """Compute it by order statistics, which assumes only that the values are independent."""
        ordered = sorted(values)
        n = len(ordered)
        margin = 0.98 * math.sqrt(n)  # 1.96 standard deviations of a binomial count with p = 1/2
        low = max(0, math.floor(n / 2 - margin))
        high = min(n - 1, math.ceil(n / 2 + margin) - 1)
        q1, _, q3 = statistics.quantiles(ordered, n=4, method="inclusive") if n > 1 else ordered * 3
        return Spread(statistics.median(ordered), ordered[low], ordered[max(low, high)], (q1, q3))

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.low:.3g}, {self.high:.3g}]"

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "ci95": [self.low, self.high], "quartiles": list(self.quartiles)}


@dataclass(frozen=True)
class Times:
    """Milliseconds per step of every contestant, one number for each round."""

    ms: Mapping[str, Sequence[float]]

    def spread(self, name: str) -> Spread:
        return Spread.from_values(self.ms[name])

    def ratio(self, name: str, to: str) -> Spread:
        """Return the time of `name` over that of `to`: below 1 it is faster."""
        return Spread.from_values([a / b for a, b in zip(self.ms[name], self.ms[to])])

    def to_json(self, to: str) -> dict[str, Any]:
        return {
            name: {
                "ms": self.spread(name).to_json(),
                f"ratio to {to}": self.ratio(name, to).to_json(),
                "rounds": list(self.ms[name]),
            }
            for name in self.ms
        }


def interleave(
    contestants: Mapping[str, StepsFn],
    *,
    rounds: int,
    steps: int,
    barrier: Callable[[], object] = lambda: None,
    warm: int = 1,
) -> Times:
    """Time the contestants in turn.

    Args:
        contestants: functions that run n steps, by name.
        rounds: how often each contestant is timed.
        steps: how many steps are timed in a round.
        barrier: waits until the work of a block is complete: a barrier of ranks, `torch.cuda.synchronize`.
        warm: how many steps are run before them, for caches and threads.
    """
    names = list(contestants)
    ms: dict[str, list[float]] = {name: [] for name in names}
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            contestants[name](warm)
            barrier()
            start = time.perf_counter()
            contestants[name](steps)
            barrier()
            ms[name].append(1000 * (time.perf_counter() - start) / steps)
    return Times(ms)


def repeat_fn(step: Callable[[], object]) -> StepsFn:
    """Return a function that calls `step` n times."""

    def run_steps(n: int) -> None:
        for _ in range(n):
            step()

    return run_steps


def count_steps(seconds: float, run_steps: StepsFn) -> int:
    """Measure how many steps take `seconds`."""
    run_steps(2)
    start = time.perf_counter()
    run_steps(2)
    return max(1, round(2 * seconds / (time.perf_counter() - start)))


def peak_rss_bytes() -> int:
    """Return the peak resident memory of this process. (getrusage would include that of the parent process.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def describe_machine() -> dict[str, Any]:
    """Describe the machine, and whether it was busy with something else."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    facts = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    facts = {key.strip(): value.strip() for key, value in facts.items()}
    flags = facts.get("flags", "").split()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": facts.get("model name", platform.processor() or platform.machine()),
        "features": [name for name in CPU_FEATURES if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels": torch.backends.cpu.get_cpu_capability(),
    }


def format_machine(machine: Mapping[str, Any]) -> str:
    """Format what `describe_machine` returned as one line."""
    return ", ".join(f"{k} {' '.join(v) if isinstance(v, list) else v}" for k, v in machine.items())


def format_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a table with aligned columns, the first one to the left."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = ["  ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def save_json(path: str | None, results: Mapping[str, Any]) -> None:
    """Write results to a file, if `path` is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(results, indent=1) + "\n")
