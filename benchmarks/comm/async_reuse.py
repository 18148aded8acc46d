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

from benchmarks.lib.session_fixture import endless, noise, playing
from benchmarks.lib.timing import Times, describe, interleave, machine, save, steps_for, table
from paragan.comm.world import World
from paragan.config.resolve import spec_of
from paragan.data.dataset import Images, load
from paragan.plan.cost import forward_flops, round_flops
from paragan.train.build import build_nets, placed
from paragan.train.session import Session, assemble

BLOCK_S = 0.5
FORMS = {"alternating": (), "simultaneous": ("strategy.order=together",), "async": ("strategy=async",)}
WIDER = 3


def session(name: str, images: Images, wider: int, *settings: str, world: World | None = None) -> Session:
    """A recipe's session, with a G that is `wider` times as wide as the recipe's."""
    run, device, world = endless(name, images, *settings), torch.device("cpu"), world or World.solo()
    spec = spec_of(run, images)
    pair = build_nets(run, spec, device)
    if wider > 1:
        wide = dataclasses.replace(run.nets, width=wider * run.nets.width)
        pair = placed(run, dataclasses.replace(pair, g=wide.generator(spec)), device)
    return assemble(run, world, images, pair)


def measured(name: str, images: Images, wider: int, rounds: int) -> dict[str, Any]:
    sessions = {form: session(name, images, wider, *settings) for form, settings in FORMS.items()}
    torch.set_num_threads(next(iter(sessions.values())).run.device.threads or torch.get_num_threads())
    contestants = {form: playing(s) for form, s in sessions.items()}
    times = interleave(contestants, rounds=rounds, steps=steps_for(BLOCK_S, contestants["async"]))
    s = sessions["async"]
    g, d = forward_flops(s.game)
    batch, d_steps = s.run.batch, s.run.d_steps
    counted = round_flops(g, d, batch, d_steps) / round_flops(g, d, batch, d_steps, s.role.for_d)
    return {
        "g over d": g / d,
        "gain counted": counted,
        "gain measured": gain(times),
        "times": times.to_json("alternating"),
    }


def gain(times: Times) -> list[float]:
    """How many times faster than alternating: the median, and the interval of it."""
    ratio = times.ratio("async", "alternating")
    return [1 / ratio.median, 1 / ratio.high, 1 / ratio.low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    about, found = machine(), dict[str, Any]()
    print(describe(about))
    digits, grey = load("digits", resolution=8), noise(32, 1)
    for case, given in {
        "digits": ("digits", digits, 1),
        f"digits, G {WIDER} times as wide": ("digits", digits, WIDER),
        "fashion": ("fashion", grey, 1),
    }.items():
        found[case] = measured(*given, options.rounds)
        save(options.json, {"machine": about, "cases": found})
    print(gains(found))


def gains(found: dict[str, Any]) -> str:
    """What was counted and measured of every case, as a table."""
    rows = [
        (case, *(f"{x:.3f}" for x in (row["g over d"], row["gain counted"], *row["gain measured"])))
        for case, row in found.items()
    ]
    return table(("case", "G / D", "gain counted", "measured", "low", "high"), rows)


if __name__ == "__main__":
    main()
