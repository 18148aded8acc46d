"""Measure teams, G on one rank and D on another: `python -m benchmarks.comm.gd_teams [--json F] [--rounds N]`.

Two ranks (gloo), one thread each, interleaved, all with the optimistic optimizers of `async`:

    async        --strategy async --strategy.split=1:1
    alternating  --strategy sync: both ranks train both networks on half of the lanes
    one process  --strategy sync on one rank with two threads, while the other rank waits

The expected speed-up is counted (plan/cost.py): a rank of sync computes half of all operations, a rank of a team those
of its player, and the slower player decides. Messages are not counted. For `digits`, for G's batch twice and a quarter
of D's, and for a G three times as wide.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.comm.async_reuse import OPTIMISTIC, WIDTH_FACTOR, format_speedups, make_session, speedup
from benchmarks.lib.session_fixture import make_play_fn
from benchmarks.lib.subprocess_timing import SendFn, barrier, run_ranks
from benchmarks.lib.timing import StepsFn, count_steps, describe_machine, format_machine, interleave, save_json
from paragan.comm.world import World
from paragan.data.dataset import load_data
from paragan.plan.cost import count_forward_flops, count_turn_flops
from paragan.train.session import Session

BLOCK_S = 1.0
CASES: dict[str, tuple[int, tuple[str, ...]]] = {  # times the width of G, settings
    "digits, 1:1": (1, ()),
    "digits, 2:1": (1, ("g_batch=256",)),
    f"digits, G {WIDTH_FACTOR} times as wide, 1:1": (WIDTH_FACTOR, ()),
    f"digits, G {WIDTH_FACTOR} times as wide, 2:1": (WIDTH_FACTOR, ("g_batch=256",)),
    f"digits, G {WIDTH_FACTOR} times as wide, 1:4": (WIDTH_FACTOR, ("g_batch=32",)),
}


def count_speedup(session: Session) -> tuple[float, float]:
    """Return the operations of G over those of D, and the expected speed-up of teams over sync on both ranks."""
    run, game = session.run, session.game
    g_flops, d_flops = count_forward_flops(game)
    sync = count_turn_flops(g_flops, d_flops, run.batch, run.d_steps, True, game.g_to_d_batch_ratio)
    teams = count_turn_flops(g_flops, d_flops, run.batch, run.d_steps, False, game.g_to_d_batch_ratio)
    return g_flops / d_flops, sum(sync) / 2 / max(teams)


def play_with_threads(session: Session, threads: int) -> StepsFn:
    """Return a function that plays rounds of a session with so many threads, and one thread afterwards."""
    play = make_play_fn(session)

    def run_steps(n: int) -> None:
        torch.set_num_threads(threads)
        play(n)
        torch.set_num_threads(1)

    return run_steps


def wait_steps(n: int) -> None:
    """Do nothing: the other rank computes."""


def rank_main(world: World, send: SendFn, rounds: int) -> None:
    """Measure all cases on one rank."""
    images = load_data("digits", resolution=8)
    for case, (g_scale, settings) in CASES.items():
        teams_settings = "strategy=async", "strategy.split='1:1'", *settings
        teams = make_session("digits", images, g_scale, *teams_settings, world=world)
        sync = make_session("digits", images, g_scale, *OPTIMISTIC, *settings, world=world)
        steps = torch.tensor([float(count_steps(BLOCK_S, make_play_fn(sync)))])
        world.all_ranks.all_reduce_sum(steps).wait()
        mean_steps = round(steps.item() / world.size)
        one_process: StepsFn = wait_steps
        if world.is_main:
            alone = make_session("digits", images, g_scale, *OPTIMISTIC, "device.threads=2", *settings)
            one_process = play_with_threads(alone, 2)
        contestants = {"async": make_play_fn(teams), "alternating": make_play_fn(sync), "one process": one_process}
        times = interleave(contestants, rounds=rounds, steps=mean_steps, barrier=lambda: barrier(world))
        if teams.role.drain:
            teams.role.drain()
        g_over_d, counted = count_speedup(sync)
        row = {"g_over_d": g_over_d, "counted_speedup": counted, "measured_speedup": speedup(times)}
        row["speedup over one process"] = speedup(times, "one process")
        send((case, {**row, "times": times.to_json("alternating")}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    results: dict[str, Any] = {}
    for case, row in run_ranks(2, rank_main, options.rounds):
        results[case] = row
        save_json(options.json, {"machine": machine, "cases": results})
        print(case, flush=True)
    print(format_speedups(results))


if __name__ == "__main__":
    main()
