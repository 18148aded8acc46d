"""Train a convolutional GAN, StyleGAN2 and a transformer GAN for the same computing time, and score them.

    python -m benchmarks.quality.equal_time fashion --data fashion_mnist.npz [--minutes 60] [--jobs 2] [--json F]
    python -m benchmarks.quality.equal_time cifar --data part0.npz part1.npz part2.npz [--grid G] [--json F]

Every run is `paragan train` at 32 px and small width with one thread, conditional on the class, and is stopped when its
process has used so many minutes of processor time; so the load of the machine matters little. Learning rates, losses
and augmentations are those of the recipes. Scores: in the features of a ResNet-20 trained on the data (`paragan eval
--features resnet20`), of 10,000 images of the averaged generator.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from PIL import Image

import paragan as pg
from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from benchmarks.quality.quality import run_paragan
from paragan.core.jsonl import read_jsonl

DATA_SETTINGS: dict[str, tuple[str, ...]] = {
    "fashion": ("--data.resolution=32", "--data.channels=1", "--data.mirror=false"),
    "cifar": ("--data.resolution=32", "--data.channels=3", "--data.mirror=true"),
}
CASES: dict[str, tuple[str, ...]] = {
    "SNGAN": ("fashion", "--nets.width=32", "--nets.d_width=32"),
    "StyleGAN2": (
        *("stylegan2-cifar10", "--nets.channel_base=1024", "--nets.channel_max=64", "--nets.latent=128"),
        *("--nets.style=128", "--nets.stddev_group=4", "--batch=32"),
    ),
    "GAT": ("gat-tiny-cifar10",),
}
FIXED = (
    *("--device.threads=1", "--device.precision=float32", "--ema.half_life_kimg=10", "--kimg=100000"),
    *("--evaluation.metrics=[]", "--output.checkpoint_kimg=1e9", "--output.fakes_kimg=1e9", "--output.tick_kimg=2"),
)
METRICS = "fd,is,prdc,accuracy"
COUNT = 10_000
STOPPED_STATUS = 3  # of a run that a signal stopped
POLL_S = 1.0
GRID_ROWS, GRID_COLUMNS = 4, 10
MINUTES_FILE = "processor_minutes.txt"  # of a run whose training has ended


def join_parts(paths: Sequence[str], out: Path) -> Path:
    """Write the images and labels of several npz files to one."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        parts = [np.load(path) for path in paths]
        images, labels = (np.concatenate([part[name] for part in parts]) for name in ("images", "labels"))
        np.savez(out, images=images, labels=labels)
    return out


def processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Return the seconds that a running process has computed, in all its threads."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def train(folder: Path, settings: Sequence[str], minutes: float) -> None:
    """Train a run for so many minutes of processor time, unless that was done before."""
    trained = folder / MINUTES_FILE
    if trained.exists() and float(trained.read_text()) == minutes:
        return
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut off: its time is not known
    command = [sys.executable, "-m", "paragan", "train", *settings, *FIXED, f"--run-dir={folder}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        while process.poll() is None and processor_seconds(process) < 60 * minutes:
            time.sleep(POLL_S)
        process.send_signal(signal.SIGTERM)
        if process.wait() != STOPPED_STATUS:
            raise SystemExit(f"{folder.name} ended with status {process.returncode}")
    trained.write_text(str(minutes))


def score(folder: Path) -> dict[str, float]:
    """Return the scores of a run in the features of a classifier of its data."""
    run_paragan("eval", str(folder), "--features=resnet20", f"--metrics={METRICS}", f"--count={COUNT}")
    return {row["name"]: row["value"] for row in read_jsonl(folder / "metrics.jsonl")}


def count_numbers(folder: Path) -> dict[str, int]:
    """Return how many numbers each network of a run has: parameters and buffers."""
    counts: dict[str, int] = {}
    for network, part in (("g", "model"), ("d", "discriminator")):
        tensors = safetensors.numpy.load_file(folder / "model" / f"{part}.safetensors")
        counts[f"{network}_numbers"] = sum(tensor.size for tensor in tensors.values())
    return counts


def save_grid(folders: Sequence[Path], out: Path) -> None:
    """Write images of every run below each other: a column for each class."""
    blocks: list[np.ndarray] = []
    for folder in folders:
        samples = folder / "samples.npz"
        labels = ",".join(map(str, range(GRID_COLUMNS)))
        run_paragan(
            "sample", str(folder), f"--labels={labels}", f"--count={GRID_ROWS * GRID_COLUMNS}", f"--out={samples}"
        )
        data = np.load(samples)
        images = np.concatenate([data["images"][data["labels"] == label] for label in range(GRID_COLUMNS)])
        side = images.shape[1]
        grid = images.reshape(GRID_COLUMNS, GRID_ROWS, side, side, -1).transpose(1, 2, 0, 3, 4)
        blocks.append(grid.reshape(GRID_ROWS * side, GRID_COLUMNS * side, -1))
        blocks.append(np.full((side // 4, *blocks[-1].shape[1:]), 255, np.uint8))
    Image.fromarray(np.concatenate(blocks[:-1]).squeeze()).save(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data_set", choices=DATA_SETTINGS)
    parser.add_argument("--data", nargs="+", required=True, metavar="NPZ")
    parser.add_argument("--minutes", type=float, default=60.0, help="of processor time, for each run (60)")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at once (2)")
    parser.add_argument("--runs", default="runs/equal_time", metavar="DIR", help="folder of the runs")
    parser.add_argument("--grid", metavar="G", help="also write a picture of their images")
    parser.add_argument("--json", metavar="F", help="results: finished runs are not repeated")
    options = parser.parse_args()
    runs = Path(options.runs)
    data = join_parts(options.data, runs / f"{options.data_set}.npz")
    results: dict[str, Any] = {"data_set": options.data_set, "minutes": options.minutes, "count": COUNT, "rows": []}
    results["machine"] = describe_machine()
    if options.json and Path(options.json).exists():
        results = json.loads(Path(options.json).read_text())
    print(format_machine(results["machine"]))
    cases = options.cases.split(",")
    folders = {case: runs / f"{options.data_set}-{case}-{options.seed}" for case in cases}
    rows: list[dict[str, Any]] = results["rows"]
    missing = [c for c in cases if not any((row["case"], row["seed"]) == (c, options.seed) for row in rows)]

    def run_case(case: str) -> dict[str, Any]:
        folder = folders[case]
        settings = (*CASES[case], f"--data={data}", *DATA_SETTINGS[options.data_set], f"--seed={options.seed}")
        train(folder, settings, options.minutes)
        row = {"case": case, "seed": options.seed, **count_numbers(folder), "kimg": pg.load(folder).kimg}
        return row | score(folder)

    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(run_case, missing):
            rows.append(row)
            print(rows[-1], flush=True)
            save_json(options.json, results)
    print(format_table(list(rows[0]), [[_format(value) for value in row.values()] for row in rows]))
    if options.grid:
        save_grid([folders[case] for case in cases], Path(options.grid))


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
