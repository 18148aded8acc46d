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

from benchmarks.comm.async_reuse import WIDER, gain, gains, session
from benchmarks.lib.session_fixture import playing
from benchmarks.lib.subprocess_timing import Tell, meet, told
from benchmarks.lib.timing import describe, interleave, machine, save, steps_for
from paragan.comm.world import World
from paragan.data.dataset import load
from paragan.plan.cost import forward_flops, turn_flops
from paragan.train.session import Session

BLOCK_S = 1.0
CASES: dict[str, tuple[int, tuple[str, ...]]] = {  # how much wider G is, settings
    "digits, 1:1": (1, ()),
    "digits, 2:1": (1, ("g_batch=256",)),
    f"digits, G {WIDER} times as wide, 1:1": (WIDER, ()),
    f"digits, G {WIDER} times as wide, 2:1": (WIDER, ("g_batch=256",)),
    f"digits, G {WIDER} times as wide, 1:4": (WIDER, ("g_batch=32",)),
}


def counted(s: Session) -> tuple[float, float]:
    """Operations of G over those of D, and how many times faster teams are to be than sync on both ranks."""
    g, d = forward_flops(s.game)
    alone = turn_flops(g, d, s.run.batch, s.run.d_steps, True, s.game.ratio)
    apart = turn_flops(g, d, s.run.batch, s.run.d_steps, False, s.game.ratio)
    return g / d, sum(alone) / 2 / max(apart)


def work(world: World, tell: Tell, rounds: int) -> None:
    """One rank."""
    images = load("digits", resolution=8)
    for case, (wider, settings) in CASES.items():
        teams = session("digits", images, wider, "strategy=async", "strategy.split='1:1'", *settings, world=world)
        sync = session("digits", images, wider, *settings, world=world)
        steps = torch.tensor([float(steps_for(BLOCK_S, playing(sync)))])
        world.everyone.sum(steps).wait()
        contestants = {"async": playing(teams), "alternating": playing(sync)}
        each = round(steps.item() / world.size)
        times = interleave(contestants, rounds=rounds, steps=each, meet=lambda: meet(world))
        over, expected = counted(sync)
        row = {"g over d": over, "gain counted": expected, "gain measured": gain(times)}
        tell((case, {**row, "times": times.to_json("alternating")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    about, found = machine(), dict[str, Any]()
    print(describe(about))
    for case, row in told(2, work, options.rounds):
        found[case] = row
        save(options.json, {"machine": about, "cases": found})
        print(case, flush=True)
    print(gains(found))


if __name__ == "__main__":
    main()
