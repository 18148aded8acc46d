"""Measure the memory that a sharded optimizer saves: `python -m benchmarks.comm.sharded_memory [--json F]`.

Each case is played for a few rounds by ranks in processes of their own, with and without
`--strategy.shard_optimizer=true`. A rank says how far its resident memory rose above what it was after a tiny round
(the interpreter and the libraries): at the most, and after the last round, when only what lives between rounds is left.
glibc is told to give back what is freed. Beside it stands the state that `paragan train -n` foresees.
"""

from __future__ import annotations

import argparse
import gc
import os
from pathlib import Path
from typing import Any

from benchmarks.lib.session_fixture import make_endless_run, make_session, random_dataset
from benchmarks.lib.subprocess_timing import SendFn, run_ranks
from benchmarks.lib.timing import describe_machine, format_machine, format_table, peak_rss_bytes, save_json
from benchmarks.speed.memory import MALLOC_RETURNS_MEMORY
from paragan.comm.world import World
from paragan.plan.cost import estimate_run_cost
from paragan.plan.round_cost import blank_dataset, build_roles
from paragan.train.loop import play_round

NUM_ROUNDS = 3
FIXED = (
    *("nets=dcgan", "lanes=4", "d_steps=1", "data.resolution=64", "data.channels=3", "device.precision=float32"),
    *("g.optimizer=adam", "d.optimizer=adam", "strategy=sync"),
)
CASES: dict[str, tuple[str, ...]] = {  # Adam for both players, the average of G
    "DCGAN of width 128, batch 4": ("nets.width=128", "batch=4"),
    "DCGAN of width 128, batch 64": ("nets.width=128", "batch=64"),
}
SHARDED = "strategy.shard_optimizer=true"


def resident_bytes() -> int:
    """Return the memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rank_main(world: World, send: SendFn, settings: tuple[str, ...]) -> None:
    """Send what every rank took, in bytes: at the most, and between rounds."""
    images = random_dataset(64, 3, 64)
    play_round(make_session(make_endless_run("fashion", images, *FIXED, "nets.width=4", "batch=4"), images))
    gc.collect()
    before = resident_bytes()
    session = make_session(make_endless_run("fashion", images, *FIXED, *settings), images, world)
    for _ in range(NUM_ROUNDS):
        play_round(session)
    gc.collect()
    taken = (peak_rss_bytes() - before, resident_bytes() - before)
    send([tuple(map(int, row.split())) for row in world.all_gather_str(" ".join(map(str, taken)))])


def foresee_state(settings: tuple[str, ...], ranks: int) -> int:
    """Return the bytes of a rank's state, as `paragan train -n` says them."""
    images = random_dataset(64, 3, 64)
    game, roles = build_roles(make_endless_run("fashion", images, *FIXED, *settings), blank_dataset(images), ranks)
    return estimate_run_cost(game, roles, rounds=1, round_flops=0, peak_bytes=0).state_bytes


def measure(settings: tuple[str, ...], ranks: int) -> dict[str, int]:
    """Return what the rank takes that takes most, and what is foreseen, in bytes."""
    (rows,) = run_ranks(ranks, rank_main, settings)
    return {
        "peak": max(row[0] for row in rows),
        "between rounds": max(row[1] for row in rows),
        "foreseen state": foresee_state(settings, ranks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    os.environ |= MALLOC_RETURNS_MEMORY
    machine = describe_machine()
    print(format_machine(machine))
    results: dict[str, Any] = {}
    for case, settings in CASES.items():
        for ranks in (2, 4):
            results[f"{ranks} ranks, {case}"] = {
                "whole": measure(settings, ranks),
                "sharded": measure((*settings, SHARDED), ranks),
            }
            save_json(options.json, {"machine": machine, "cases": results})
    print(format_table(("case, MB", "peak", "between rounds", "state foreseen"), _format_rows(results)))


def _format_rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = list[tuple[str, ...]]()
    for case, kinds in results.items():
        for kind, row in kinds.items():
            names = ("peak", "between rounds", "foreseen state")
            rows.append((f"{case}, {kind}", *(f"{row[name] / 1e6:.0f}" for name in names)))
    return rows


if __name__ == "__main__":
    main()
