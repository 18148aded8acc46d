"""Measure the memory that teams save: `python -m benchmarks.comm.team_memory [--json F]`. Two ranks, or four.

A rank of `--strategy sync` holds the gradients, optimizer states and activations of both networks, for its part of the
lanes; a rank of a team those of its own network, for more lanes. Each case is played for a few rounds by ranks in
processes of their own, which say how far their resident memory rose above what it was after a tiny round (the
interpreter and the libraries). glibc is told to give back what is freed. All have the optimistic optimizers of `async`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.comm.async_reuse import OPTIMISTIC
from benchmarks.lib.session_fixture import make_endless_run, make_session, random_dataset
from benchmarks.lib.subprocess_timing import SendFn, run_ranks
from benchmarks.lib.timing import describe_machine, format_machine, format_table, peak_rss_bytes, save_json
from benchmarks.speed.memory import MALLOC_RETURNS_MEMORY
from paragan.comm.world import World
from paragan.train.loop import play_round

NUM_ROUNDS = 3
FIXED = ("lanes=4", "d_steps=1", "data.resolution=64", "data.channels=3", "device.precision=float32")
CASES: dict[str, tuple[str, ...]] = {  # 64 px, in colour
    "DCGAN of width 128, batch 8": ("nets=dcgan", "nets.width=128", "batch=8"),
    "DCGAN of width 128, batch 64": ("nets=dcgan", "nets.width=128", "batch=64"),
    "DCGAN of width 32, batch 64": ("nets=dcgan", "nets.width=32", "batch=64"),
}
STRATEGIES: dict[str, tuple[str, ...]] = {"sync": OPTIMISTIC, "async": ("strategy=async",)}


def rank_main(world: World, send: SendFn, settings: tuple[str, ...]) -> None:
    """Send the peak memory of every rank in bytes."""
    images = random_dataset(64, 3, 256)
    tiny = make_session(make_endless_run("fashion", images, *FIXED, "nets=dcgan", "nets.width=4", "batch=4"), images)
    play_round(tiny)
    before = peak_rss_bytes()
    session = make_session(make_endless_run("fashion", images, *FIXED, *settings), images, world)
    for _ in range(NUM_ROUNDS):
        play_round(session)
    if session.role.drain:
        session.role.drain()
    send([int(peak) for peak in world.all_gather_str(str(peak_rss_bytes() - before))])


def measure(case: str, ranks: int) -> dict[str, Any]:
    """Return the peak memory of every rank by strategy, and the share that a rank of each team needs."""
    peaks: dict[str, list[int]] = {}
    for name, settings in STRATEGIES.items():
        split = (f"strategy.split='{ranks // 2}:{ranks // 2}'",) if name == "async" else ()
        (peaks[name],) = run_ranks(ranks, rank_main, (*CASES[case], *settings, *split))
    largest = max(peaks["sync"])
    teams = {"G": max(peaks["async"][: ranks // 2]), "D": max(peaks["async"][ranks // 2 :])}
    return {"bytes": peaks, "share of sync": {team: peak / largest for team, peak in teams.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    os.environ |= MALLOC_RETURNS_MEMORY
    machine = describe_machine()
    print(format_machine(machine))
    results: dict[str, Any] = {}
    for ranks in (2, 4):
        for case in CASES:
            results[f"{ranks} ranks, {case}"] = measure(case, ranks)
            save_json(options.json, {"machine": machine, "cases": results})
    print(format_table(("case", "sync, MB", "G, MB", "D, MB", "G / sync", "D / sync"), _format_rows(results)))


def _format_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for case, row in results.items():
        sync, teams = max(row["bytes"]["sync"]), row["bytes"]["async"]
        shares = row["share of sync"]
        megabytes = [f"{nbytes / 1e6:.0f}" for nbytes in (sync, teams[0], teams[-1])]
        rows.append((case, *megabytes, f"{shares['G']:.2f}", f"{shares['D']:.2f}"))
    return rows


if __name__ == "__main__":
    main()
