"""Compare the choice of `--strategy auto` with the measured time of every strategy it compares.

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
from benchmarks.lib.subprocess_timing import run_ranks
from paragan.comm.world import World
from paragan.config.resolve import fill_strategy_defaults, load_dataset, make_spec, resolve
from paragan.config.run import Run
from paragan.data.dataset import Dataset
from paragan.plan.select.candidates import parse_strategy
from paragan.plan.select.choose import choose_strategy, comparable_candidates
from paragan.plan.select.convergence_limits import find_limits
from paragan.plan.select.playoff import Contestant
from paragan.recipes import get_recipe
from paragan.strategies.auto import Auto, AutoChoice
from paragan.train.build import build_networks
from paragan.train.console import RunConsole
from paragan.train.run_dir_selection import RunDirRequest
from paragan.train.session import Session, build_session

RANK_COUNTS = (1, 2, 4)
BLOCKS = 15  # of every strategy
MARGIN = 0.05


def rank_main(world: World, report: Any) -> None:
    """One rank."""
    torch.set_num_threads(max(1, timing.describe_machine()["cores"] // world.size))
    run = dataclasses.replace(get_recipe("digits"), strategy=Auto())
    images = load_dataset(run.data)
    run = resolve(run, images)
    start = time.perf_counter()
    selected = choose_strategy(run, images, world, RunDirRequest(Path("/nowhere"), None, "never"), RunConsole(False))
    report({"about": list(selected.reasons), "took_s": time.perf_counter() - start})
    name = selected.reasons[0].removeprefix("strategy: ").split(": ")[0]
    names = _candidate_names(run, world)
    report({"chosen": name, "names": names})
    contest = {name: Contestant(_make_session(run, name, images, world)) for name in names}
    for block in range(BLOCKS):
        for one in names[block % len(names) :] + names[: block % len(names)]:
            contest[one].play_block()
    report({name: statistics.median(one.round_s) for name, one in contest.items()})
    world.close()  # rank 0 goes last
    os._exit(0)  # threads of links may still wait


def _candidate_names(run: Run, world: World) -> list[str]:
    """What auto compares, and nothing speaks against."""
    if world.size == 1:
        return ["sync", "async"]
    from paragan.plan.profile.profile import DeviceInfo, Profile, TurnProfile

    even = (TurnProfile(64, (0.0,) * 16, 1.0, 1.0),)
    profile = Profile("", "", DeviceInfo("", "", 1, "", 0.0, 1, "", ""), (1, 1), 1.0, even, even)
    result = comparable_candidates(Auto(), None, profile, run, world.size)
    return [one.name for one in result if not find_limits(one.strategy, world.size, 0.0)]


def _make_session(run: Run, name: str, images: Dataset, world: World) -> Session:
    strategy = parse_strategy(name).without_rank_loss()
    run = fill_strategy_defaults(dataclasses.replace(run, strategy=strategy, auto_choice=AutoChoice()))
    return build_session(run, world, images, build_networks(run, make_spec(run.data, images), CPU))


def time_strategies(ranks: int) -> dict[str, Any]:
    """All strategies on so many ranks here."""
    decision, about, seconds = list(run_ranks(ranks, rank_main))
    best = min(seconds, key=lambda name: seconds[name])
    mine = seconds.get(about["chosen"]) or min(
        (s for name, s in seconds.items() if _strategy_kind(name) == _strategy_kind(about["chosen"])),
        default=float("nan"),
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


def _strategy_kind(name: str) -> str:
    """Teams may be divided in other ways than those that were measured."""
    return "+".join(word for word in name.split("+") if not word.startswith("split="))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default=",".join(map(str, RANK_COUNTS)))
    parser.add_argument("--json")
    options = parser.parse_args()
    result = {"machine": timing.describe_machine(), "margin": MARGIN, "rows": list[dict[str, Any]]()}
    for ranks in map(int, options.ranks.split(",")):
        row = time_strategies(ranks)
        result["rows"].append(row)
        print(f"{ranks} ranks: auto chose {row['chosen']}, best is {row['best']}: {row['slower']:+.1%}", flush=True)
        for name, seconds in row["seconds"].items():
            print(f"    {name:<50}{1000 * seconds:9.1f} ms a round")
    timing.save_json(options.json, result)


if __name__ == "__main__":
    main()
