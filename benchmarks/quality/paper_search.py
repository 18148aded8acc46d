"""Search settings with which plain optimistic gradient steps, the papers' own updates, train a GAN.

    python -m benchmarks.quality.paper_search digits [--json F]
    python -m benchmarks.quality.paper_search fashion --data fashion_mnist.npz [--json F]

Settings are drawn at random: the objective (with or without spectral norm in D), the learning rate of each player, the
batch and the schedule of the rates. One process trains them by DQGAN's update without quantization (`--strategy
quantized --strategy.paper_update=true --strategy.wire=exact`). Every trial gets `--first-kimg` images; the `--keep`
best by the Fréchet distance in pixel space are trained anew with `--kimg`. A run whose numbers are not finite has
diverged.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.quality import RECIPES

UPDATE = ("--strategy=quantized", "--strategy.paper_update=true", "--strategy.wire=exact")
FIXED = ("--policy=dqgan", "--device.threads=1", "--device.precision=float32", "--output.checkpoint_kimg=1e9")
SCORES = ("--evaluation.metrics=fd", "--evaluation.every_kimg=0", "--output.fakes_kimg=1e9")
PLAIN, SPECTRAL = ("--nets.spectral=false",), ("--nets.spectral=true", "--objective.gp=0")
OBJECTIVES = {
    "wasserstein, penalty 1": (*PLAIN, "--objective.loss=wasserstein", "--objective.gp=1"),
    "wasserstein, penalty 10": (*PLAIN, "--objective.loss=wasserstein", "--objective.gp=10"),
    "nonsaturating, spectral": (*SPECTRAL, "--objective.loss=nonsaturating"),
    "hinge, spectral": (*SPECTRAL, "--objective.loss=hinge"),
}
G_RATES, D_RATES = (0.02, 0.5), {False: (0.002, 0.1), True: (0.02, 0.5)}  # of D: without and with spectral norm
BATCHES = (32, 64, 128)
SCHEDULES = ("constant", "linear")


@dataclass(frozen=True)
class Trial:
    """Settings that are tried."""

    objective: str
    g_rate: float
    d_rate: float
    batch: int
    schedule: str

    @staticmethod
    def draw(random: np.random.Generator) -> Trial:
        """Draw settings at random; the logarithm of a rate is distributed evenly."""
        objective = str(random.choice(list(OBJECTIVES)))
        g_rate, d_rate = (
            float(f"{np.exp(random.uniform(*np.log(limits))):.2g}")
            for limits in (G_RATES, D_RATES["spectral" in objective])
        )
        return Trial(objective, g_rate, d_rate, int(random.choice(BATCHES)), str(random.choice(SCHEDULES)))

    @property
    def settings(self) -> tuple[str, ...]:
        players = (("g", self.g_rate), ("d", self.d_rate))
        rates = [f"--{player}.optimizer.lr={rate}" for player, rate in players]
        schedules = [f"--{player}.schedule={self.schedule}" for player, _ in players]
        return (*OBJECTIVES[self.objective], *rates, *schedules, f"--batch={self.batch}")


def train(recipe: Sequence[str], kimg: float, runs: Path, numbered: tuple[int, Trial]) -> float | None:
    """Train a trial and return its Fréchet distance; None if it diverged. A run that exists is not repeated."""
    number, trial = numbered
    folder = runs / f"trial-{number}-{kimg:g}"
    if not (folder / "report.html").exists():
        settings = (*recipe, *UPDATE, *FIXED, *SCORES, *trial.settings, f"--kimg={kimg}", f"--run-dir={folder}")
        command = [sys.executable, "-m", "paragan", "train", *settings]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode and "not finite" in done.stderr:
            return None
        if done.returncode:
            raise SystemExit(done.stderr)
    scores = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return next(score["value"] for score in scores if score["name"].startswith("fd"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=("digits", "fashion"))
    parser.add_argument("--data", metavar="PATH")
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--first-kimg", type=float, default=40)
    parser.add_argument("--kimg", type=float, default=160)
    parser.add_argument("--seed", type=int, default=0, help="of the trials")
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--runs", default="runs/paper_search", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    recipe = (*RECIPES[options.recipe], *((f"--data={options.data}",) if options.data else ()))
    random = np.random.default_rng(options.seed)
    trials = [Trial.draw(random) for _ in range(options.trials)]
    runs = Path(options.runs) / options.recipe
    with ThreadPoolExecutor(options.jobs) as pool:
        first = list(pool.map(partial(train, recipe, options.first_kimg, runs), enumerate(trials)))
        finite = [number for number, fd in enumerate(first) if fd is not None]
        kept = sorted(finite, key=lambda number: first[number] or 0.0)[: options.keep]
        last = pool.map(partial(train, recipe, options.kimg, runs), [(number, trials[number]) for number in kept])
    final = dict(zip(kept, last))
    rows: list[dict[str, Any]] = [
        {**asdict(trial), "fd first": first[number], "fd": final.get(number)} for number, trial in enumerate(trials)
    ]
    header = {"recipe": options.recipe, "settings": recipe, "machine": machine}
    save_json(options.json, {**header, "first kimg": options.first_kimg, "kimg": options.kimg, "rows": rows})
    print(format_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows]))


if __name__ == "__main__":
    main()
