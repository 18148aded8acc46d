"""The networks at CIFAR's size: how fast they are, and that each trains under every strategy.

    python -m benchmarks.speed.networks step [--networks sngan,biggan] [--rounds N] [--json F]
    python -m benchmarks.speed.networks strategies --data CIFAR.npz [--strategies sync,async] [--steps 200] [--json F]

step        a round (five steps of D, one of G, batch 64, published widths) of a `*-cifar10` recipe on random images,
            ours against the loop of plain.py: NCHW, two calls of D, power iteration in every forward pass. In turns;
            a pass of 64 images in one lane, as there. Memory is what a process of its own took for two rounds.
strategies  200 rounds of small forms of the same networks on real images, two ranks, from the command line: the losses
            at the end, which are finite, and the seconds
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.lib import plain_pytorch as plain
from benchmarks.lib.session_fixture import make_endless_run, make_play_fn, make_session, random_dataset
from benchmarks.lib.timing import (
    StepsFn,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    peak_rss_bytes,
    repeat_fn,
    save_json,
)
from paragan.core.devices import BACKENDS
from paragan.data.dataset import Dataset

# name: a recipe, and what is changed; but for DCGAN and BigGAN-deep as they were published for CIFAR-10
PUBLISHED_NETS: dict[str, tuple[str, ...]] = {
    "dcgan": ("sngan-cifar10", "nets=dcgan"),
    "sngan": ("sngan-cifar10",),
    "sagan": ("sagan-cifar10",),
    "biggan": ("biggan-cifar10",),
    "biggan-deep": ("biggan-cifar10", "nets=biggan-deep", "nets.width=64"),
    "contragan": ("contragan-cifar10",),
    "r3gan": ("r3gan-cifar10", "nets.width=192", "batch=64", "d_steps=1"),  # a quarter of its width
}
SMALL_NETS = {  # the least that attention takes at 32 px, where there is any
    "dcgan": ("nets.width=16",),
    "sngan": ("nets.width=16", "nets.d_width=16"),
    "sagan": ("nets.width=4",),
    "biggan": ("nets.width=4",),
    "biggan-deep": ("nets.width=8",),
    "contragan": ("nets.width=4", "nets.embedding=32"),
    "r3gan": ("nets.width=16", "nets.group=8"),
}
STRATEGIES = ("sync", "quantized", "gossip", "async", "per-label")
BATCH = 32


# Steps ----------------------------------------------------------------------------------------------------


PLAIN = "plain"
CONTESTANTS = (
    *(f"ours, {precision}" for precision in ("float32", *(["bf16"] if BACKENDS["cpu"].supports_bf16() else []))),
    PLAIN,
)


def make_contestant(name: str, who: str, images: Dataset) -> StepsFn:
    recipe, *settings = PUBLISHED_NETS[name]
    settings += ["lanes=1", "device.lanes_per_pass=0"]
    if who == PLAIN:
        return repeat_fn(plain.PlainTrainer(make_endless_run(recipe, images, *settings), images).step)
    return make_play_fn(
        make_session(make_endless_run(recipe, images, *settings, f"device.precision={who.split()[-1]}"), images)
    )


def measure_steps(name: str, images: Dataset, rounds: int) -> dict[str, Any]:
    recipe, *settings = PUBLISHED_NETS[name]
    run = make_endless_run(recipe, images, *settings, "lanes=1", "device.lanes_per_pass=0", "device.precision=float32")
    difference = plain.max_output_difference(run, images)
    players = {who: make_contestant(name, who, images) for who in CONTESTANTS}
    parameters = [sum(p.numel() for p in player.flat.parameters) for player in make_session(run, images).game.players]
    for play in players.values():
        play(1)  # a step takes seconds: once is warm enough
    times = interleave(players, rounds=rounds, steps=1, warm=0)
    return {
        "parameters": parameters,
        "outputs differ": difference,
        "ms": {who: times.spread(who).to_json() for who in players},
        "times faster": {who: times.ratio(PLAIN, who).to_json() for who in players if who != PLAIN},
        "took_gb": {who: peak_gb(name, who) for who in players},
    }


def peak_gb(name: str, who: str) -> float:
    """Memory of two rounds in a process of its own, GB, beyond that of the interpreter and the libraries."""
    command = [sys.executable, "-m", "benchmarks.speed.networks", "step", "--play", f"{name}:{who}"]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def measure_peak_gb(name: str, who: str) -> float:
    images = random_dataset(32, 3)
    torch.nn.Conv2d(3, 3, 3)(torch.zeros(1, 3, 8, 8)).sum().backward()
    before = peak_rss_bytes()
    make_contestant(name, who, images)(2)
    return 1e-9 * (peak_rss_bytes() - before)


def benchmark_steps(networks: list[str], rounds: int) -> dict[str, Any]:
    images, result = random_dataset(32, 3), dict[str, Any]()
    for name in networks:
        result[name] = measure_steps(name, images, rounds)
        print(f"{name}: {json.dumps(result[name]['times faster'])}", flush=True)
    rows = [
        [
            f"{name}, {who}",
            *(f"{n / 1e6:.2f}M" for n in row["parameters"]),
            f"{row['ms'][who]['median']:,.0f}",
            f"{row['took_gb'][who]:.2f}",
            *([f"{row['times faster'][who][key]:.2f}" for key in ("median",)] if who != PLAIN else [""]),
        ]
        for name, row in result.items()
        for who in row["ms"]
    ]
    print(format_table(["", "G", "D", "ms a round", "GB", "times faster"], rows))
    return result


# Strategies -----------------------------------------------------------------------------------------------


def train_network(name: str, strategy: str, data: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """A run of the command line: its losses at the end."""
    recipe, *settings = PUBLISHED_NETS[name]
    single = strategy == "per-label"
    labels = 2 if single else 1
    fixed = (
        *(
            f"data.path={data}",
            f"strategy={strategy}",
            f"batch={BATCH}",
            "lanes=4",
            "d_steps=1",
            "device.lanes_per_pass=0",
        ),
        *(f"kimg={rounds * BATCH * labels / 1000}", "evaluation.metrics=[]", "output.checkpoint_kimg=1e9"),
        *("output.fakes_kimg=1e9", f"output.tick_kimg={rounds * BATCH / 1000}", "device.threads=1"),
        *(("objective.contrastive=0",) if single and name == "contragan" else ()),
    )
    command = [sys.executable, "-m", "paragan", "train", recipe, "--ranks=2", f"--run-dir={folder}"]
    changes = [*(s for s in settings if s.startswith("nets")), *SMALL_NETS[name], *fixed]
    start = time.perf_counter()
    done = subprocess.run([*command, *(f"--{s}" for s in changes)], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1], "seconds": seconds}
    stats = sorted(folder.glob("labels/*/stats.jsonl")) if single else [folder / "stats.jsonl"]
    lines = [json.loads(file.read_text().splitlines()[-1]) for file in stats]
    losses = {key: [line[f"Loss/{key}/loss"] for line in lines] for key in "GD"}
    finite = all(np.isfinite(values).all() for values in losses.values())
    return {"losses": losses, "finite": finite, "rounds": lines[0]["Progress/step"], "seconds": seconds}


def select_labels(data: Path, target: Path, labels: int) -> Path:
    """The images of the first labels alone."""
    held = np.load(data)
    images: NDArray[Any] = held["images"]
    mine = held["labels"] < labels
    np.savez(target, images=images[mine], labels=held["labels"][mine])
    return target


def benchmark_strategies(networks: list[str], selected: list[str], data: Path, rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {name: {} for name in networks}
    with tempfile.TemporaryDirectory() as folder:
        two = select_labels(data, Path(folder) / "two.npz", 2)
        for name in networks:
            for strategy in selected:
                where = Path(folder) / f"{name}-{strategy}"
                used = two if strategy == "per-label" else data
                row = result[name][strategy] = train_network(name, strategy, used, rounds, where)
                print(f"{name}, {strategy}: {row}", flush=True)
    rows = [
        [
            name,
            *("finite" if row.get("finite") else str(row.get("error", "not finite")) for row in result[name].values()),
        ]
        for name in networks
    ]
    print(format_table(["", *selected], rows))
    return result


def format_row(row: dict[str, Any]) -> str:
    return f"finite, {row['seconds']:.0f} s" if row.get("finite") else str(row.get("error", "not finite"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "strategies"])
    parser.add_argument("--networks", default=",".join(PUBLISHED_NETS))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--rounds", type=int, default=5, help="of every contestant (step)")
    parser.add_argument("--data", type=Path, help="images uint8 [N, 32, 32, 3] and labels (strategies)")
    parser.add_argument("--steps", type=int, default=200, help="rounds that are trained (strategies)")
    parser.add_argument("--play", help=argparse.SUPPRESS)
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.play:
        print(measure_peak_gb(*options.play.split(":")))
        return 0
    where = describe_machine() | {"threads": torch.get_num_threads()}
    print(format_machine(where))
    networks = options.networks.split(",")
    if options.what == "step":
        result = benchmark_steps(networks, options.rounds)
    else:
        result = benchmark_strategies(networks, options.strategies.split(","), options.data, options.steps)
    save_json(options.json, {"machine": where, "command": " ".join(sys.argv[1:]), options.what: result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
