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
from benchmarks.lib.session_fixture import endless, noise
from benchmarks.lib.timing import Spread, Times, describe, interleave, machine, save, table
from paragan.comm.world import World
from paragan.core.devices import huge_pages, keep_memory
from paragan.data.dataset import Images, load
from paragan.plan.tune.greedy_search import Decided, Layout, Switch, decide
from paragan.plan.tune.layout_tuner import Worker, switches_of
from paragan.plan.tune.op_profile import CONVOLUTIONS, PRODUCTS

SMALL = ("batch=16", "d_steps=1", "lanes=1")
NETWORKS: dict[str, tuple[str, ...]] = {
    "digits": ("digits",),
    "fashion": ("fashion", "batch=32"),
    "dcgan": ("sngan-cifar10", "nets=dcgan", "lanes=1"),
    "sngan": ("sngan-cifar10", *SMALL),
    "sagan": ("sagan-cifar10", *SMALL),
    "biggan": ("biggan-cifar10", *SMALL),
}
ALL = ("channels_last", "precision", "threads", "huge_pages", "rewritten", "one_call")
CORES = torch.get_num_threads()
ALONE = "its multiplications alone"
KEPT = "plain, memory kept"


def images_of(name: str) -> Images:
    return load("digits", resolution=8) if name == "digits" else noise(32, 1 if name == "fashion" else 3)


class Plain:
    """The plain loop, with all cores, and pages as they come. kept: in memory that its process does not give back."""

    def __init__(self, name: str, kept: bool = False):
        spawn = multiprocessing.get_context("spawn")
        self.asked, other = spawn.Pipe()
        spawn.Process(target=plainly, args=(other, name, kept), daemon=True).start()

    def __call__(self, steps: int) -> None:
        self.asked.send(steps)
        self.asked.recv()


def plainly(asked: Connection, name: str, kept: bool) -> None:
    """The process that plays it, as many steps as it is asked for."""
    warnings.simplefilter("ignore")
    recipe, *settings = NETWORKS[name]
    images = images_of(name)
    loop = plain.Naive(endless(recipe, images, *settings), images)
    huge_pages(False)
    if kept:
        keep_memory()
    with contextlib.suppress(EOFError):
        while True:
            for _ in range(asked.recv()):
                loop.step()
            asked.send("done")


class Multiplications(TorchDispatchMode):
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
        if func._overloadpacket in CONVOLUTIONS or func._overloadpacket in PRODUCTS:
            self.calls.append((func, args, dict(kwargs or {})))
            self.threads = torch.get_num_threads()
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def __call__(self, steps: int) -> None:
        torch.set_num_threads(self.threads)
        huge_pages(True)
        for _ in range(steps):
            for func, args, kwargs in self.calls:
                func(*args, **kwargs)


def added(found: Decided, switches: Sequence[Switch], standing: Layout) -> dict[str, Layout]:
    """The defaults, then one decision more each, those that are worth most first, and what is built last."""
    rows: dict[str, Layout] = {"defaults": dict(standing)}
    so_far, taken = dict(standing), [switch for switch in switches if switch.name in found.shares]
    for switch in sorted(taken, key=lambda switch: (switch.built, -found.shares[switch.name])):
        so_far |= {field: found.layout[field] for field in switch.choices[0]}
        rows[f"+ {switch.name}"] = dict(so_far)
    return rows


def measured(name: str, rounds: int, block_s: float, every: bool, quick: bool) -> dict[str, Any]:
    recipe, *settings = NETWORKS[name]
    images = images_of(name)
    run = endless(recipe, images, *settings)
    worker = Worker(run, images, World.solo(), rounds=3 if quick else 7, most_s=1e9)
    switches = switches_of(run, worker.world.device)
    start = time.perf_counter()
    found = decide(switches, worker)
    took = time.perf_counter() - start
    standing = {field: value for s in switches for field, value in s.choices[0].items()}
    rows = added(found, switches, standing)
    contestants: dict[str, Any] = {"plain": Plain(name), KEPT: Plain(name, kept=True)}
    for row, layout in rows.items():
        contestants[row] = _often(worker.player(layout))
    contestants[ALONE] = Multiplications(worker.player({**found.layout, "device.graph": False}))
    for play in contestants.values():
        play(1)
    steps = max(1, round(block_s / _seconds(contestants["plain"])))
    times = interleave(contestants, rounds=rounds, steps=steps, warm=0)
    last = list(rows)[-1]
    print(f"\n{name}: {run.batch} images; decided in {took:.0f} s\n{shown(times)}", flush=True)
    del contestants
    about = {"decided_s": took, "layout": found.layout, "shares": found.shares, "times": times.to_json("plain")}
    about |= {
        "plain/kept": times.ratio("plain", KEPT).to_json(),
        "plain/decided": times.ratio("plain", last).to_json(),
        "plain/alone": times.ratio("plain", ALONE).to_json(),
    }
    return about | ({"all": tried(worker, found.layout, standing, switches, quick)} if every else {})


def tried(worker: Worker, decided: Layout, standing: Layout, switches: Sequence[Any], quick: bool) -> dict[str, Any]:
    """Every combination of the switches in ALL, once each; the fastest of them, and these as programs, against what was
    decided, in turns."""
    listed = [s for s in switches if s.name in ALL]
    combinations = [
        {**standing, **{field: value for choice in chosen for field, value in choice.items()}}
        for chosen in itertools.product(*(s.choices for s in listed))
    ]
    once = Worker(worker.run, worker.images, worker.world, rounds=1, most_s=1e9)
    seconds = [min(once([layout])[0].seconds) for layout in combinations]
    order = sorted(range(len(seconds)), key=lambda i: seconds[i])[: 3 if quick else 6]
    fastest = [combinations[i] for i in order]
    if any(switch.name == "graph" for switch in switches):
        fastest += [{**layout, "device.graph": True} for layout in fastest[:2]]
    now, *best = worker([decided, *fastest])
    ratios = [Spread.of([a / b for a, b in zip(now.seconds, other.seconds)]) for other in best]
    worst = max(range(len(ratios)), key=lambda k: ratios[k].median)
    differs = {field: value for field, value in fastest[worst].items() if value != decided.get(field)}
    print(f"what was decided takes {ratios[worst]} of the fastest of {len(combinations)}, which differs in {differs}")
    return {"combinations": len(combinations), "decided/best": ratios[worst].to_json(), "best differs in": differs}


def _often(play: Any) -> Any:
    def plays(steps: int) -> None:
        for _ in range(steps):
            play()

    return plays


def _seconds(play: Any) -> float:
    start = time.perf_counter()
    play(1)
    return time.perf_counter() - start


def shown(times: Times) -> str:
    """A row each: ms, how many times faster than the plain loop, and than the row above."""
    names = list(times.ms)
    rows = []
    for above, name in zip([names[0], *names], names):
        to_plain, own = times.ratio("plain", name), times.ratio(above, name)
        rows.append([name, f"{times.of(name).median:.1f}", str(to_plain), str(own)])
    return table(["", "ms a round", "times faster than plain", "than the row above"], rows)


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
    where = machine() | {"threads": CORES}
    print(describe(where))
    every = options.all.split(",")
    found = {
        name: measured(name, options.rounds, options.block, name in every, options.quick)
        for name in options.networks.split(",")
    }
    save(options.json, {"machine": where, "command": " ".join(sys.argv[1:]), "networks": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
