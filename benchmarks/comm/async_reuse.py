"""What saving a forward pass of G gains: `python -m benchmarks.comm.async_reuse [--json F] [--rounds N]`. One process.

With `--strategy async` D judges what G makes in its own turn; alternating training makes images for D
alone. How many operations that saves is counted (plan/cost.py), how much time is measured, in turns: for `digits`, for
`digits` with a G three times as wide, and for the networks of `fashion`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from benchmarks.lib.session_fixture import make_endless_run, make_play_fn, random_dataset
from benchmarks.lib.timing import (
    Times,
    count_steps,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    save_json,
)
from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.data.dataset import Dataset, load_data
from paragan.plan.cost import count_forward_flops, count_round_flops
from paragan.train.build import build_networks, to_device
from paragan.train.session import Session, build_session

BLOCK_S = 0.5
SETTINGS_BY_CASE = {"alternating": (), "simultaneous": ("strategy.order=simultaneous",), "async": ("strategy=async",)}
WIDTH_FACTOR = 3


def make_session(name: str, images: Dataset, wider: int, *settings: str, world: World | None = None) -> Session:
    """A recipe's session, with a G that is `wider` times as wide as the recipe's."""
    run, device, world = make_endless_run(name, images, *settings), torch.device("cpu"), world or World.solo()
    spec = make_spec(run, images)
    pair = build_networks(run, spec, device)
    if wider > 1:
        wide = dataclasses.replace(run.nets, width=wider * run.nets.width)
        pair = to_device(run, dataclasses.replace(pair, g=wide.generator(spec)), device)
    return build_session(run, world, images, pair)


def measure(name: str, images: Dataset, wider: int, rounds: int) -> dict[str, Any]:
    sessions = {form: make_session(name, images, wider, *settings) for form, settings in SETTINGS_BY_CASE.items()}
    torch.set_num_threads(next(iter(sessions.values())).run.device.threads or torch.get_num_threads())
    contestants = {form: make_play_fn(s) for form, s in sessions.items()}
    times = interleave(contestants, rounds=rounds, steps=count_steps(BLOCK_S, contestants["async"]))
    s = sessions["async"]
    g, d = count_forward_flops(s.game)
    batch, d_steps = s.run.batch, s.run.d_steps
    counted = count_round_flops(g, d, batch, d_steps) / count_round_flops(
        g, d, batch, d_steps, s.role.extra_fakes_for_d
    )
    return {
        "g over d": g / d,
        "gain counted": counted,
        "gain measured": speedup(times),
        "times": times.to_json("alternating"),
    }


def speedup(times: Times) -> list[float]:
    """How many times faster than alternating: the median, and the interval of it."""
    ratio = times.ratio("async", "alternating")
    return [1 / ratio.median, 1 / ratio.high, 1 / ratio.low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    about, found = describe_machine(), dict[str, Any]()
    print(format_machine(about))
    digits, grey = load_data("digits", resolution=8), random_dataset(32, 1)
    for case, given in {
        "digits": ("digits", digits, 1),
        f"digits, G {WIDTH_FACTOR} times as wide": ("digits", digits, WIDTH_FACTOR),
        "fashion": ("fashion", grey, 1),
    }.items():
        found[case] = measure(*given, options.rounds)
        save_json(options.json, {"machine": about, "cases": found})
    print(format_speedups(found))


def format_speedups(found: dict[str, Any]) -> str:
    """What was counted and measured of every case, as a table."""
    rows = [
        (case, *(f"{x:.3f}" for x in (row["g over d"], row["gain counted"], *row["gain measured"])))
        for case, row in found.items()
    ]
    return format_table(("case", "G / D", "gain counted", "measured", "low", "high"), rows)


if __name__ == "__main__":
    main()
