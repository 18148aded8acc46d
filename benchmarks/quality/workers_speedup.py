"""Measure in how many steps DQGAN reaches a score, with 1, 2, 4 and 8 workers.

    python -m benchmarks.quality.workers_speedup [--wire exact] [--seeds 0,1,2] [--json F]

The digits, DQGAN's own update with int8, or with another --wire (`--policy dqgan`). A worker computes the gradient of
16 images in a step, so n workers take 16 n. The learning rates of n workers are those of the policy times a factor; all
factors are tried with the first seed, and the best of them (fewest steps) is trained with the other seeds: the speed-up
compares the best of one worker with the best of n. A run that diverges never reaches a score. The Fréchet distance in
pixel space is taken every 100 steps, of the mean of the weights over as many steps for any number of workers.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.quality import run_paragan
from paragan.optim.policies import POLICIES

WORKERS = (1, 2, 4, 8)
WORKER_IMAGES = 16  # of a worker, in a step
RATE_FACTORS = (1.0, 2.0, 4.0)
SCORED_STEPS = 100
MAX_STEPS = 1500
EMA_HALF_LIFE_STEPS = 40
TARGETS = (1.0, 0.7, 0.5)  # Fréchet distances


def train(folder: Path, wire: str, workers: int, factor: float, seed: int) -> list[tuple[int, float]]:
    """Train a run, unless it is finished; return the Fréchet distance after so many steps."""
    kimg_of_step = workers * WORKER_IMAGES / 1000
    policy = POLICIES["dqgan"]("dcgan")
    if not (folder / "report.html").exists():
        try:
            run_paragan(
                *("train", "digits", "--strategy=DQGAN", f"--strategy.wire={wire}", "--policy=dqgan"),
                *(f"--ranks={workers}", f"--batch={workers * WORKER_IMAGES}", "--lanes=8", f"--seed={seed}"),
                *(f"--g.optimizer.lr={factor * policy.g['lr']}", f"--d.optimizer.lr={factor * policy.d['lr']}"),
                *(f"--kimg={MAX_STEPS * kimg_of_step}", f"--ema.half_life_kimg={EMA_HALF_LIFE_STEPS * kimg_of_step}"),
                *("--evaluation.metrics=fd", f"--evaluation.every_kimg={SCORED_STEPS * kimg_of_step}"),
                *("--output.checkpoint_kimg=1e9", "--output.fakes_kimg=1e9", f"--run-dir={folder}"),
            )
        except SystemExit as error:
            if error.code != 1:
                raise
            return []  # it diverged
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(round(row["kimg"] / kimg_of_step), row["value"]) for row in rows]


def steps_to(target: float, curve: Sequence[tuple[int, float]]) -> float:
    """Return after how many steps the distance is at most `target`; infinity: never."""
    return next((step for step, fd in curve if fd <= target), math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", default="int8")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="runs/workers", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    first, *others = map(int, options.seeds.split(","))
    rows: list[dict[str, Any]] = []

    def add(workers: int, factor: float, seed: int) -> dict[str, Any]:
        folder = Path(options.runs) / options.wire / f"{workers}-{factor:g}-{seed}"
        curve = train(folder, options.wire, workers, factor, seed)
        steps = {f"{target:g}": steps_to(target, curve) for target in TARGETS}
        rows.append({"workers": workers, "factor": factor, "seed": seed, "steps": steps, "curve": curve})
        print({name: value for name, value in rows[-1].items() if name != "curve"}, flush=True)
        save_json(options.json, {"machine": machine, "wire": options.wire, "rows": rows, "best": summarize(rows)})
        return rows[-1]

    for workers in WORKERS:
        tried = [add(workers, factor, first) for factor in RATE_FACTORS]
        best = min(tried, key=lambda row: tuple(reversed(row["steps"].values())))
        for seed in others:
            add(workers, best["factor"], seed)
    best_rows = summarize(rows)
    print(format_table(("workers", "factor", *map(str, TARGETS)), [_format_row(row) for row in best_rows]))


def summarize(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the factor, and [lowest, median, highest] steps to each target, by number of workers."""
    result = list[dict[str, Any]]()
    for workers in dict.fromkeys(row["workers"] for row in rows):
        mine = [row for row in rows if row["workers"] == workers]
        factors = [row["factor"] for row in mine]
        factor = statistics.mode(factors) if len(set(factors)) < len(factors) else factors[-1]
        steps = {
            name: [
                f(row["steps"][name] for row in mine if row["factor"] == factor) for f in (min, statistics.median, max)
            ]
            for name in mine[0]["steps"]
        }
        result.append({"workers": workers, "factor": factor, "steps": steps})
    return result


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    steps = (f"{median:g} [{low:g}, {high:g}]" for low, median, high in row["steps"].values())
    return (str(row["workers"]), f"{row['factor']:g}", *steps)


if __name__ == "__main__":
    main()
