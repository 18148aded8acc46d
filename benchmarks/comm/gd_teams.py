"""What it gains that one rank plays G and another D: `python -m benchmarks.comm.gd_teams [--json F] [--rounds N]`.

Two ranks (gloo), one thread each, in turns: `--strategy async --strategy.split=1:1` and `--strategy sync`, where both
play both on half of the lanes. What is to be expected is counted (plan/cost.py): sync needs half of all operations,
teams as many as the player that needs more. Messages and exchanges are not in the count. For `digits`, for G's batch
twice and a quarter of D's, and for a G three times as wide.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.comm.async_reuse import WIDTH_FACTOR, format_speedups, make_session, speedup
from benchmarks.lib.session_fixture import make_play_fn
from benchmarks.lib.subprocess_timing import SendFn, barrier, run_ranks
from benchmarks.lib.timing import count_steps, describe_machine, format_machine, interleave, save_json
from paragan.comm.world import World
from paragan.data.dataset import load_data
from paragan.plan.cost import count_forward_flops, count_turn_flops
from paragan.train.session import Session

BLOCK_S = 1.0
CASES: dict[str, tuple[int, tuple[str, ...]]] = {  # how much wider G is, settings
    "digits, 1:1": (1, ()),
    "digits, 2:1": (1, ("g_batch=256",)),
    f"digits, G {WIDTH_FACTOR} times as wide, 1:1": (WIDTH_FACTOR, ()),
    f"digits, G {WIDTH_FACTOR} times as wide, 2:1": (WIDTH_FACTOR, ("g_batch=256",)),
    f"digits, G {WIDTH_FACTOR} times as wide, 1:4": (WIDTH_FACTOR, ("g_batch=32",)),
}


def count_speedup(s: Session) -> tuple[float, float]:
    """Operations of G over those of D, and how many times faster teams are to be than sync on both ranks."""
    g, d = count_forward_flops(s.game)
    alone = count_turn_flops(g, d, s.run.batch, s.run.d_steps, True, s.game.g_to_d_batch_ratio)
    apart = count_turn_flops(g, d, s.run.batch, s.run.d_steps, False, s.game.g_to_d_batch_ratio)
    return g / d, sum(alone) / 2 / max(apart)


def rank_main(world: World, send: SendFn, rounds: int) -> None:
    """One rank."""
    images = load_data("digits", resolution=8)
    for case, (wider, settings) in CASES.items():
        teams = make_session("digits", images, wider, "strategy=async", "strategy.split='1:1'", *settings, world=world)
        sync = make_session("digits", images, wider, *settings, world=world)
        steps = torch.tensor([float(count_steps(BLOCK_S, make_play_fn(sync)))])
        world.all_ranks.all_reduce_sum(steps).wait()
        contestants = {"async": make_play_fn(teams), "alternating": make_play_fn(sync)}
        each = round(steps.item() / world.size)
        times = interleave(contestants, rounds=rounds, steps=each, barrier=lambda: barrier(world))
        over, expected = count_speedup(sync)
        row = {"g over d": over, "gain counted": expected, "gain measured": speedup(times)}
        send((case, {**row, "times": times.to_json("alternating")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    about, found = describe_machine(), dict[str, Any]()
    print(format_machine(about))
    for case, row in run_ranks(2, rank_main, options.rounds):
        found[case] = row
        save_json(options.json, {"machine": about, "cases": found})
        print(case, flush=True)
    print(format_speedups(found))


if __name__ == "__main__":
    main()
