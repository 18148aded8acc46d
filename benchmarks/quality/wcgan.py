"""Compare parallel W-CGAN with DC-CGAN at a fixed budget of computing time, on some labels of a data set.

    python -m benchmarks.quality.wcgan fashion --data fashion_mnist.npz --pace F [--json F]
    python -m benchmarks.quality.wcgan cifar --data cifar10_part0.npz cifar10_part1.npz --pace F [--json F]

A budget is `--minutes` of one core for each label. It is turned into images by the pace of every case, which is
measured first, on an idle machine with two ranks or workers at work, and written to `--pace` (`--only-pace` ends
there). Runs then train for so many images, so that the load of the machine does not matter.

Cases:

* W-CGAN               : one Wasserstein GAN with clipped weights for each label, five steps of D (policy `wcgan`)
* W-CGAN, one D step   : the same with one step of D, as in the authors' code
* DC-CGAN              : one DCGAN for each label, D on one rank and G on another (policy `dcgan`)
* conditional DCGAN    : one DCGAN for all labels, on two ranks (policy `dcgan`)

Scores: in the features of a ResNet-20 trained on the data (`paragan eval --features resnet20`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.quality import run_paragan

RECIPES: dict[str, tuple[str, ...]] = {
    "fashion": ("fashion", "--data.resolution=16", "--nets=dcgan", "--nets.width=32"),
    "cifar": ("fashion", "--data.channels=3", "--data.resolution=32", "--nets=dcgan", "--nets.width=32"),
}
FIXED = ("--lanes=2", "--batch=100", "--device.precision=float32", "--device.threads=1", "--ema.half_life_kimg=5")
QUIET_OUTPUT = ("--output.fakes_kimg=1e9", "--output.checkpoint_kimg=1e9", "--evaluation.metrics=[]")
METRICS = "fd,is,prdc,accuracy,intra_fd"
COUNT = 3000  # fakes


@dataclass(frozen=True)
class Case:
    """A way to train all labels: its settings and how ranks share the labels.

    settings       : of the run
    strategy       : how labels share the ranks; "": one conditional GAN
    ranks_per_label: that train a label together
    """

    settings: tuple[str, ...]
    strategy: str
    ranks_per_label: int


WCGAN = ("--policy=wcgan", "--nets.spectral=false")
DCGAN = ("--policy=dcgan", "--nets.spectral=false", "--nets.batch_norm=true")
CASES = {
    "W-CGAN": Case(WCGAN, "per-label", 1),
    "W-CGAN, one D step": Case((*WCGAN, "--d_steps=1"), "per-label", 1),
    "DC-CGAN": Case(DCGAN, "DC-CGAN", 2),
    "conditional DCGAN": Case(DCGAN, "", 2),
}
PILOT_KIMG = 8


def select_labels(paths: Sequence[str], labels: Sequence[int], out: Path) -> Path:
    """Write the images of some labels of several npz files to one file."""
    parts = [np.load(path) for path in paths]
    images = np.concatenate([part["images"] for part in parts])
    all_labels = np.concatenate([part["labels"] for part in parts])
    chosen = np.isin(all_labels, labels)
    np.savez(out, images=images[chosen], labels=np.searchsorted(labels, all_labels[chosen]))
    return out


def measure_pace(case: Case, settings: Sequence[str], folder: Path) -> float:
    """Return the kimg a minute of one label (of all labels in a conditional run) while two ranks are at work."""
    train(case, settings, PILOT_KIMG, folder, ranks=2)
    files = sorted(folder.rglob("stats.jsonl"))
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return 60 / statistics.median(line["Timing/sec_per_kimg"] for line in lines[1:])


def kimg_of_budget(case: Case, pace: float, minutes: float, labels: int) -> float:
    """Return the images of all labels that fit into the budget, in thousands."""
    return labels * minutes / case.ranks_per_label * pace


def train(case: Case, settings: Sequence[str], kimg: float, folder: Path, ranks: int) -> None:
    """Train a run, unless it is finished."""
    if not (folder / "report.html").exists():
        strategy = () if not case.strategy else (f"--strategy={case.strategy}",)
        length = (f"--ranks={ranks}", f"--kimg={kimg:.1f}", f"--run-dir={folder}")
        run_paragan("train", *settings, *strategy, *QUIET_OUTPUT, *length)


def score(folder: Path) -> dict[str, float]:
    """Return the scores of a run in the features of a classifier of its data."""
    run_paragan("eval", str(folder), "--features=resnet20", f"--metrics={METRICS}", f"--count={COUNT}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["name"]: row["value"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--data", nargs="+", required=True, metavar="NPZ")
    parser.add_argument("--labels", default="0,1,2", help="of the data set, which are trained")
    parser.add_argument("--minutes", type=float, default=2.0, help="of a core, for each label")
    parser.add_argument("--pace", required=True, metavar="F", help="measured here unless it exists")
    parser.add_argument("--only-pace", action="store_true")
    parser.add_argument("--cases", help="names, separated by ; (default: all)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--runs", default="runs/wcgan", metavar="DIR", help="folder of the runs")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    runs = Path(options.runs)
    runs.mkdir(parents=True, exist_ok=True)
    labels = [int(label) for label in options.labels.split(",")]
    data = select_labels(options.data, labels, runs / f"{options.recipe}.npz")
    settings = {name: (*RECIPES[options.recipe], f"--data={data}", *FIXED, *CASES[name].settings) for name in CASES}
    if not Path(options.pace).exists():
        machine = describe_machine()
        paces = {
            name: measure_pace(case, settings[name], runs / f"{options.recipe}-pace-{i}")
            for i, (name, case) in enumerate(CASES.items())
        }
        save_json(options.pace, {"machine": machine, "recipe": options.recipe, "kimg a minute": paces})
    pace = json.loads(Path(options.pace).read_text())
    print(format_machine(pace["machine"]), pace["kimg a minute"])
    if options.only_pace:
        return
    header = {"recipe": options.recipe, "labels": labels, "minutes": options.minutes, "pace": pace}
    rows: list[dict[str, Any]] = []
    for seed in options.seeds.split(","):
        for name in options.cases.split(";") if options.cases else CASES:
            folder = runs / "-".join((options.recipe, *name.replace(",", "").split(), seed))
            kimg = kimg_of_budget(CASES[name], pace["kimg a minute"][name], options.minutes, len(labels))
            train(CASES[name], (*settings[name], f"--seed={seed}"), kimg, folder, CASES[name].ranks_per_label)
            rows.append({"case": name, "seed": int(seed), "kimg": kimg, **score(folder)})
            print(rows[-1], flush=True)
            save_json(options.json, {**header, "machine": describe_machine(), "rows": rows})
    columns = list(rows[0])
    print(format_table(columns, [[_round_digits(row[name]) for name in columns] for row in rows]))


def _round_digits(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
