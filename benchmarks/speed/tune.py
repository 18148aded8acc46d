"""What each decision of a layout is worth: `python -m benchmarks.speed.tune [--networks digits,sngan] [--json F]`.

    plain      the loop of plain.py: float32, NCHW, eager, torch's own number of threads, in a process of its own
    kept       the same, in a process that keeps the memory it frees, as ours does
    defaults   ours, as `paragan train` plays it
    ...        and one decision more in every row, in the order in which they are worth most; what is built comes last
    alone      the convolutions and products of what was decided: what is left where all else costs nothing

of every network in turns, a round each (CIFAR's residual networks: of one step of D, and 16 images), on random images.
Then every combination of the switches is timed (`--all`: those that are listed), and the fastest again as a compiled
program, which shows that deciding one by one finds none that is slower than the best of all.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.lib import plain_pytorch as plain
from benchmarks.lib.session_fixture import make_endless_run, random_dataset
from benchmarks.lib.timing import Spread, Times, describe_machine, format_machine, format_table, interleave, save_json
from paragan.comm.world import World
from paragan.core.devices import set_huge_pages, tune_malloc
from paragan.data.dataset import Dataset, load_data
from paragan.plan.tune.greedy_search import Option, Overrides, TuneResult, tune_greedily
from paragan.plan.tune.layout_tuner import TrialWorker, options_for
from paragan.plan.tune.op_profile import CONVOLUTIONS, MATMULS

SMALL = ("batch=16", "d_steps=1", "lanes=1")
NETWORKS: dict[str, tuple[str, ...]] = {
    "digits": ("digits",),
    "fashion": ("fashion", "batch=32"),
    "dcgan": ("sngan-cifar10", "nets=dcgan", "lanes=1"),
    "sngan": ("sngan-cifar10", *SMALL),
    "sagan": ("sagan-cifar10", *SMALL),
    "biggan": ("biggan-cifar10", *SMALL),
}
EXHAUSTIVE_OPTIONS = ("channels_last", "precision", "threads", "huge_pages", "rewritten", "one_call")
CORES = torch.get_num_threads()
MATMULS_ONLY = "its multiplications alone"
PLAIN_RETAINING_MEMORY = "plain, memory kept"


def make_dataset(name: str) -> Dataset:
    return load_data("digits", resolution=8) if name == "digits" else random_dataset(32, 1 if name == "fashion" else 3)


class PlainProcess:
    """The plain loop, with all cores, and pages as they come. kept: in memory that its process does not give back."""

    def __init__(self, name: str, retain_memory: bool = False):
        spawn = multiprocessing.get_context("spawn")
        self.connection, other = spawn.Pipe()
        spawn.Process(target=run_plain, args=(other, name, retain_memory), daemon=True).start()

    def __call__(self, steps: int) -> None:
        self.connection.send(steps)
        self.connection.recv()


def run_plain(connection: Connection, name: str, retain_memory: bool) -> None:
    """The process that plays it, as many steps as it is asked for."""
    warnings.simplefilter("ignore")
    recipe, *settings = NETWORKS[name]
    images = make_dataset(name)
    loop = plain.PlainTrainer(make_endless_run(recipe, images, *settings), images)
    set_huge_pages(False)
    if retain_memory:
        tune_malloc()
    with contextlib.suppress(EOFError):
        while True:
            for _ in range(connection.recv()):
                loop.step()
            connection.send("done")


class MatmulReplay(TorchDispatchMode):
    """A round's convolutions and products, on the numbers that it has, to be played again alone."""

    def __init__(self, round_: Callable[[], object]):
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        self.threads = 0
        with self:
            round_()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._overloadpacket in CONVOLUTIONS or func._overloadpacket in MATMULS:
            self.calls.append((func, args, dict(kwargs or {})))
            self.threads = torch.get_num_threads()
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def __call__(self, steps: int) -> None:
        torch.set_num_threads(self.threads)
        set_huge_pages(True)
        for _ in range(steps):
            for func, args, kwargs in self.calls:
                func(*args, **kwargs)


def cumulative_overrides(result: TuneResult, switches: Sequence[Option], defaults: Overrides) -> dict[str, Overrides]:
    """The defaults, then one decision more each, those that are worth most first, and what is built last."""
    rows: dict[str, Overrides] = {"defaults": dict(defaults)}
    so_far, read_batches = dict(defaults), [switch for switch in switches if switch.name in result.slowdown_without]
    for switch in sorted(read_batches, key=lambda switch: (switch.needs_build, -result.slowdown_without[switch.name])):
        so_far |= {field: result.overrides[field] for field in switch.choices[0]}
        rows[f"+ {switch.name}"] = dict(so_far)
    return rows


def measure(name: str, rounds: int, block_s: float, every: bool, quick: bool) -> dict[str, Any]:
    recipe, *settings = NETWORKS[name]
    images = make_dataset(name)
    run = make_endless_run(recipe, images, *settings)
    worker = TrialWorker(run, images, World.solo(), rounds=3 if quick else 7, max_round_s=1e9)
    switches = options_for(run, worker.world.device)
    start = time.perf_counter()
    result = tune_greedily(switches, worker)
    elapsed_s = time.perf_counter() - start
    standing = {field: value for s in switches for field, value in s.choices[0].items()}
    rows = cumulative_overrides(result, switches, standing)
    contestants: dict[str, Any] = {
        "plain": PlainProcess(name),
        PLAIN_RETAINING_MEMORY: PlainProcess(name, retain_memory=True),
    }
    for row, layout in rows.items():
        contestants[row] = _repeat(worker.make_trial(layout))
    contestants[MATMULS_ONLY] = MatmulReplay(worker.make_trial({**result.overrides, "device.capture_passes": False}))
    for play in contestants.values():
        play(1)
    steps = max(1, round(block_s / _time_once(contestants["plain"])))
    times = interleave(contestants, rounds=rounds, steps=steps, warm=0)
    last = list(rows)[-1]
    print(f"\n{name}: {run.batch} images; decided in {elapsed_s:.0f} s\n{format_rows(times)}", flush=True)
    del contestants
    about = {
        "decided_s": elapsed_s,
        "layout": result.overrides,
        "shares": result.slowdown_without,
        "times": times.to_json("plain"),
    }
    about |= {
        "plain/kept": times.ratio("plain", PLAIN_RETAINING_MEMORY).to_json(),
        "plain/decided": times.ratio("plain", last).to_json(),
        "plain/alone": times.ratio("plain", MATMULS_ONLY).to_json(),
    }
    return about | ({"all": try_all_combinations(worker, result.overrides, standing, switches, quick)} if every else {})


def try_all_combinations(
    worker: TrialWorker, tuned: Overrides, defaults: Overrides, switches: Sequence[Any], quick: bool
) -> dict[str, Any]:
    """Every combination of the switches in ALL, once each; the fastest of them, and these as programs, against what was
    decided, in turns."""
    listed = [s for s in switches if s.name in EXHAUSTIVE_OPTIONS]
    combinations = [
        {**defaults, **{field: value for choice in selected for field, value in choice.items()}}
        for selected in itertools.product(*(s.choices for s in listed))
    ]
    once = TrialWorker(worker.run, worker.images, worker.world, rounds=1, max_round_s=1e9)
    seconds = [min(once([layout])[0].round_s) for layout in combinations]
    order = sorted(range(len(seconds)), key=lambda i: seconds[i])[: 3 if quick else 6]
    fastest = [combinations[i] for i in order]
    if any(switch.name == "graph" for switch in switches):
        fastest += [{**layout, "device.capture_passes": True} for layout in fastest[:2]]
    now, *best = worker([tuned, *fastest])
    ratios = [Spread.from_values([a / b for a, b in zip(now.round_s, other.round_s)]) for other in best]
    worst = max(range(len(ratios)), key=lambda k: ratios[k].median)
    differs = {field: value for field, value in fastest[worst].items() if value != tuned.get(field)}
    print(f"what was decided takes {ratios[worst]} of the fastest of {len(combinations)}, which differs in {differs}")
    return {"combinations": len(combinations), "decided/best": ratios[worst].to_json(), "best differs in": differs}


def _repeat(play: Any) -> Any:
    def plays(steps: int) -> None:
        for _ in range(steps):
            play()

    return plays


def _time_once(play: Any) -> float:
    start = time.perf_counter()
    play(1)
    return time.perf_counter() - start


def format_rows(times: Times) -> str:
    """A row each: ms, how many times faster than the plain loop, and than the row above."""
    names = list(times.ms)
    rows = []
    for above, name in zip([names[0], *names], names):
        to_plain, private = times.ratio("plain", name), times.ratio(above, name)
        rows.append([name, f"{times.spread(name).median:.1f}", str(to_plain), str(private)])
    return format_table(["", "ms a round", "times faster than plain", "than the row above"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rounds", type=int, default=9, help="that are timed of every row (9)")
    parser.add_argument("--block", type=float, default=0.5, metavar="S", help="a block of the plain loop lasts (0.5)")
    parser.add_argument("--all", default="digits,fashion,sngan", help="of which networks all combinations are tried")
    parser.add_argument("--quick", action="store_true", help="to see that it works")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    where = describe_machine() | {"threads": CORES}
    print(format_machine(where))
    every = options.all.split(",")
    result = {
        name: measure(name, options.rounds, options.block, name in every, options.quick)
        for name in options.networks.split(",")
    }
    save_json(options.json, {"machine": where, "command": " ".join(sys.argv[1:]), "networks": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
