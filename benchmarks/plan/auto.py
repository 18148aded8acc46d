"""What `--strategy auto` chooses here, beside what every strategy that it compares measures.

    python -m benchmarks.plan.auto --json benchmarks/results/auto.json                 1, 2 and 4 ranks, about 6 minutes

All play the digits on ranks of this machine, in turns, in blocks of a few rounds; a round's time is the slowest rank's,
the median over blocks. The choice is good where it is as fast as the fastest, or slower by at most 5 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib import timing
from benchmarks.lib.session_fixture import CPU
from benchmarks.lib.subprocess_timing import told
from paragan.comm.world import World
from paragan.config.resolve import load_images, resolve, settled, spec_of
from paragan.config.run import Run
from paragan.data.dataset import Images
from paragan.plan.select.candidates import strategy_of
from paragan.plan.select.choose import compared, decided, fixed
from paragan.plan.select.convergence_limits import limits_of
from paragan.plan.select.playoff import Player
from paragan.recipes import recipe
from paragan.strategies.auto import Auto, Chosen
from paragan.train.build import build_nets
from paragan.train.console import Screen
from paragan.train.run_dir import Wanted
from paragan.train.session import Session, assemble

RANKS = (1, 2, 4)
BLOCKS = 15  # of every strategy
MARGIN = 0.05


def job(world: World, tell: Any) -> None:
    """One rank."""
    torch.set_num_threads(max(1, timing.machine()["cores"] // world.size))
    run = dataclasses.replace(recipe("digits"), strategy=Auto())
    images = load_images(run)
    run = resolve(run, images)
    start = time.perf_counter()
    chosen = decided(run, images, world, Wanted(Path("/nowhere"), None, "never"), Screen(False))
    tell({"about": list(chosen.about), "took_s": time.perf_counter() - start})
    name = chosen.about[0].removeprefix("strategy: ").split(": ")[0]
    names = _names(run, world)
    tell({"chosen": name, "names": names})
    contest = {name: Player(_session(run, name, images, world)) for name in names}
    for block in range(BLOCKS):
        for one in names[block % len(names) :] + names[: block % len(names)]:
            contest[one].play()
    tell({name: statistics.median(one.times) for name, one in contest.items()})
    world.close()  # rank 0 goes last
    os._exit(0)  # threads of links may still wait


def _names(run: Run, world: World) -> list[str]:
    """What auto compares, and nothing speaks against."""
    if world.size == 1:
        return ["sync", "async"]
    from paragan.plan.profile.profile import Device, Profile, Turn

    even = (Turn(64, (0.0,) * 16, 1.0, 1.0),)
    profile = Profile("", "", Device("", "", 1, "", 0.0, 1, "", ""), (1, 1), 1.0, even, even)
    found = compared(Auto(), None, profile, run, world.size)
    return [one.name for one in found if not limits_of(one.strategy, world.size, 0.0)]


def _session(run: Run, name: str, images: Images, world: World) -> Session:
    strategy = fixed(strategy_of(name))
    run = settled(dataclasses.replace(run, strategy=strategy, chosen=Chosen()))
    return assemble(run, world, images, build_nets(run, spec_of(run, images), CPU))


def contest(ranks: int) -> dict[str, Any]:
    """All strategies on so many ranks here."""
    decision, about, seconds = list(told(ranks, job))
    best = min(seconds, key=lambda name: seconds[name])
    mine = seconds.get(about["chosen"]) or min(
        (s for name, s in seconds.items() if _kind(name) == _kind(about["chosen"])), default=float("nan")
    )
    return {
        "ranks": ranks,
        "chosen": about["chosen"],
        "best": best,
        "slower": mine / seconds[best] - 1,
        "holds": mine <= (1 + MARGIN) * seconds[best],
        "seconds": dict(sorted(seconds.items(), key=lambda one: one[1])),
        **decision,
    }


def _kind(name: str) -> str:
    """Teams may be divided in other ways than those that were measured."""
    return "+".join(word for word in name.split("+") if not word.startswith("split="))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--json")
    options = parser.parse_args()
    found = {"machine": timing.machine(), "margin": MARGIN, "rows": list[dict[str, Any]]()}
    for ranks in map(int, options.ranks.split(",")):
        row = contest(ranks)
        found["rows"].append(row)
        print(f"{ranks} ranks: auto chose {row['chosen']}, best is {row['best']}: {row['slower']:+.1%}", flush=True)
        for name, seconds in row["seconds"].items():
            print(f"    {name:<50}{1000 * seconds:9.1f} ms a round")
    timing.save(options.json, found)


if __name__ == "__main__":
    main()
