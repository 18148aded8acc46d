"""Measure the health monitor: detection of injected failures, false alarms in healthy runs, and its cost.

    python -m benchmarks.quality.health planted --json F  when each failure is detected, and by which signal; --seeds 6
    python -m benchmarks.quality.health healthy --json F  false alarms in healthy runs (expected: none)
    python -m benchmarks.quality.health cost --json F     seconds of a measurement and of a step, on the digits

Failures are injected into processes that otherwise run `paragan train digits`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import describe_machine, save_json
from paragan.core.jsonl import read_jsonl

FAST = ("--evaluation.metrics=[]", "--output.fakes_kimg=1000", "--output.best_metric=none", "--device.threads=1")

HEALTHY_RUNS: dict[str, tuple[int, tuple[str, ...]]] = {
    "sync": (1, ()),
    "sync, 2 ranks": (2, ()),
    "sync, int4 wire, 2 ranks": (2, ("--strategy.wire=int4",)),
    "sync, simultaneous, relativistic, R1 and R2": (
        1,
        ("--strategy.order=simultaneous", "--objective.loss=relativistic", "--objective.r1=1", "--objective.r2=1"),
    ),
    "quantized (int8), 2 ranks": (2, ("--strategy=quantized",)),
    "gossip, 2 ranks": (2, ("--strategy=gossip",)),
    "async, one rank": (1, ("--strategy=async",)),
    "async, teams, 2 ranks": (2, ("--strategy=async",)),
    "per label, 2 workers": (2, ("--strategy=per-label",)),
    "policy ttur": (1, ("--policy=ttur",)),
    "policy wcgan-gp": (1, ("--policy=wcgan-gp",)),
    "policy paragan": (1, ("--policy=paragan",)),
}


@dataclass(frozen=True)
class InjectedFailure:
    """A failure to inject.

    ranks               : number of ranks of the run
    kimg                : when it is injected
    inject              : changes a session during training
    inject_before_build : patches the process before the session is built
    """

    ranks: int
    kimg: float
    inject: Callable[[Any], None] | None = None
    inject_before_build: Callable[[], None] | None = None


def raise_d_lr(session: Any) -> None:
    """Multiply D's learning rate by 100."""
    player = session.game.d
    player._base_lrs = [100 * rate for rate in player._base_lrs]


def freeze_g(session: Any) -> None:
    """Make G's optimizer do nothing."""
    session.game.g.optimizer.step = lambda closure=None: None


def inject_nan_gradient(session: Any) -> None:
    """Make the gradient of one parameter of G NaN, on rank 0."""
    if session.world.is_main:
        parameter = session.game.g.flat.parameters[0].requires_grad_(True)
        parameter.register_hook(lambda grad: grad * float("nan"))
        parameter.requires_grad_(False)


def replace_label_with_noise() -> None:
    """Replace the images of label 3 by uniform noise."""
    import dataclasses

    import numpy as np

    from paragan.train import prepare

    original = prepare.load_dataset

    def load(run: Any) -> Any:
        images = original(run)
        pixels = images.images.copy()
        mask = images.labels == 3
        pixels[mask] = np.random.default_rng(0).integers(0, 256, pixels[mask].shape, dtype=np.uint8)
        return dataclasses.replace(images, images=pixels)

    prepare.load_dataset = load


def change_rank_seed() -> None:
    """Give rank 1 the initial networks and the data order of another seed."""
    import dataclasses

    from paragan.train import trainer

    if os.environ.get("RANK") == "1":
        build = trainer.build_networks
        rebind = trainer.rebind_to_world
        trainer.build_networks = lambda run, *rest: build(dataclasses.replace(run, seed=run.seed + 1), *rest)
        trainer.rebind_to_world = lambda run, *rest: rebind(dataclasses.replace(run, seed=run.seed + 1), *rest)


FAILURES: dict[str, InjectedFailure] = {
    "D's learning rate x 100, from the start": InjectedFailure(1, 0, raise_d_lr),
    "D's learning rate x 100, at 20 kimg": InjectedFailure(1, 20, raise_d_lr),
    "G frozen, from the start": InjectedFailure(1, 0, freeze_g),
    "G frozen, at 20 kimg": InjectedFailure(1, 20, freeze_g),
    "one label's data replaced by noise": InjectedFailure(1, 0, inject_before_build=replace_label_with_noise),
    "one rank with another seed": InjectedFailure(2, 0, inject_before_build=change_rank_seed),
    "NaN in a gradient, at 20 kimg": InjectedFailure(1, 20, inject_nan_gradient),
    "NaN in a gradient, at 20 kimg, 2 ranks, int8 wire": InjectedFailure(2, 20, inject_nan_gradient),
}


def inject_failure(name: str) -> None:
    """Inject a failure into this process."""
    from paragan.train import loop

    failure = FAILURES[name]
    if failure.inject_before_build:
        failure.inject_before_build()
    original = loop.play_round
    waiting = [failure.inject] if failure.inject else []

    def play_round(session: Any) -> None:
        if waiting and session.clock.images >= 1000 * failure.kimg:
            waiting.pop()(session)
        original(session)

    loop.play_round = play_round


def train_digits(
    folder: Path, ranks: int, kimg: float, settings: tuple[str, ...], planted: str = ""
) -> tuple[int, str]:
    """Run `paragan train digits` on some ranks; return the exit status and the last line of rank 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    launch_envs = [
        {"RANK": r, "WORLD_SIZE": ranks, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        for r in range(ranks if ranks > 1 else 0)
    ] or [{}]
    train = ["train", "digits", f"--run-dir={folder}", f"--kimg={kimg}", *FAST, *settings]
    command = [sys.executable, "-m", "benchmarks.quality.health", "child", planted, *train]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | {name: str(value) for name, value in launch_env.items()} | {"MASTER_ADDR": "127.0.0.1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for launch_env in launch_envs
    ]
    outputs = [process.communicate()[0] for process in processes]
    return max(process.returncode for process in processes), outputs[0].strip().rpartition("\n")[2]


def measure_detection(name: str, kimg: float, seed: int) -> dict[str, Any]:
    """Measure after how many images an injected failure was detected, and by which signal."""
    failure = FAILURES[name]
    settings = (f"--seed={seed}", *(("--strategy.wire=int8",) if "int8" in name else ()))
    with tempfile.TemporaryDirectory() as folder:
        status, last = train_digits(Path(folder) / "run", failure.ranks, failure.kimg + kimg, settings, name)
        rows = [row for row in read_jsonl(Path(folder) / "run" / "health.jsonl") if row["kimg"] >= failure.kimg]
        reached = read_jsonl(Path(folder) / "run" / "stats.jsonl")[-1]["Progress/kimg"]
    result = {"failure": name, "seed": seed, "status": status, "said": last.replace(folder, "")}
    if rows:
        signal = {field: rows[0][field] for field in ("kind", "key", "value", "limit")}
        return {
            **result,
            **signal,
            "images": round(1000 * (rows[0]["kimg"] - failure.kimg)),
            "all": _format_kinds(rows),
        }
    if status == 1:
        return {**result, "kind": "nonfinite", "key": "", "images": round(1000 * (reached - failure.kimg))}
    return {**result, "kind": "", "images": None}


def _format_kinds(rows: list[dict[str, Any]]) -> str:
    return ", ".join(f"{row['kind']} at {row['kimg']:g}" for row in rows)


def measure_false_alarms(name: str, kimg: float, seed: int) -> dict[str, Any]:
    """Train a healthy run and return the messages of the health monitor."""
    ranks, settings = HEALTHY_RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        status, last = train_digits(Path(folder) / "run", ranks, kimg, (f"--seed={seed}", *settings))
        files = sorted(Path(folder).rglob("health.jsonl"))
        messages = [
            f"{row['kind']} at {row['kimg']:g} kimg: {row['message']}" for file in files for row in read_jsonl(file)
        ]
        lines = [row for file in Path(folder).rglob("stats.jsonl") for row in read_jsonl(file)]
    steps = {player: max(row.get(f"Health/{player}/step", 0.0) for row in lines) for player in "GD"}
    about = {"run": name, "seed": seed, "status": status, "lines": len(lines), "longest_step": steps}
    return {**about, "said": messages, "last": last.replace(folder, "")}


def measure_overhead(steps: int) -> dict[str, float]:
    """Return median seconds of a step on the digits, a step without health monitor, and a health measurement."""
    import dataclasses

    import torch

    from paragan.comm.world import World
    from paragan.config.resolve import load_dataset, make_spec, resolve
    from paragan.config.sections import HealthOptions
    from paragan.recipes import get_recipe
    from paragan.train.build import build_networks
    from paragan.train.health.signals import HealthSignals
    from paragan.train.loop import play_round
    from paragan.train.session import Session, build_session

    torch.set_num_threads(1)
    images = load_dataset(get_recipe("digits").data)
    base_run = resolve(get_recipe("digits"), images)
    world = World.solo()

    def new_session(watch: bool) -> Session:
        run = dataclasses.replace(base_run, health=HealthOptions(enabled=watch))
        return build_session(run, world, images, build_networks(run, make_spec(run.data, images), world.device))

    watched = new_session(True)
    unwatched = new_session(False)
    parts = {
        "step_s": (play_round, watched),
        "unwatched_s": (play_round, unwatched),
        "look_s": (HealthSignals(), watched),
    }
    times = {part: list[float]() for part in parts}
    for _ in range(steps):
        for part, (action, session) in parts.items():
            start = time.perf_counter()
            action(session)
            times[part].append(time.perf_counter() - start)
    medians = {part: statistics.median(seconds) for part, seconds in times.items()}
    steps_per_tick = 1000 * base_run.output.tick_kimg / base_run.round_images
    return medians | {"steps_a_tick": steps_per_tick, "share": medians["look_s"] / (steps_per_tick * medians["step_s"])}


def main() -> None:
    if sys.argv[1:2] == ["child"]:
        from paragan.cli.main import main as program

        if sys.argv[2]:
            inject_failure(sys.argv[2])
        status = program(sys.argv[3:])
        sys.stdout.flush()
        os._exit(status)  # as `paragan` exits with several ranks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("planted", "healthy", "cost"))
    parser.add_argument(
        "--kimg", type=float, default=40.0, help="length of a healthy run, or after an injected failure"
    )
    parser.add_argument("--only", metavar="WORD", default="", help="only cases whose name contains this")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="0 to N - 1")
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    results: dict[str, Any] = {"machine": describe_machine()}
    if options.what == "cost":
        results |= measure_overhead(200)
        print(json.dumps(results, indent=1))
    else:
        cases = FAILURES if options.what == "planted" else HEALTHY_RUNS
        measure = measure_detection if options.what == "planted" else measure_false_alarms
        results["rows"] = []
        for name, seed in itertools.product((name for name in cases if options.only in name), range(options.seeds)):
            results["rows"].append(measure(name, options.kimg, seed))
            print(json.dumps(results["rows"][-1]), flush=True)
    save_json(options.json, results)


if __name__ == "__main__":
    main()
