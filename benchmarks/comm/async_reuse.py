"""Measure reuse of G's images for D: `python -m benchmarks.comm.async_reuse [--json F] [--rounds N]`. One process.

With `--strategy async` D uses the images that G generates in its own turn; alternating training generates images for D
alone. The operations that this saves are counted (plan/cost.py), and the time is measured, interleaved: for `digits`,
for `digits` with a G three times as wide, and for the networks of `fashion`. Alternating and simultaneous training
have the optimistic optimizers of `async` too.
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
OPTIMISTIC = ("g.optimizer_wrapper=optimistic", "d.optimizer_wrapper=optimistic")
SETTINGS_BY_CASE = {
    "alternating": OPTIMISTIC,
    "simultaneous": (*OPTIMISTIC, "strategy.order=simultaneous"),
    "async": ("strategy=async",),
}
WIDTH_FACTOR = 3


def make_session(name: str, images: Dataset, g_scale: int, *settings: str, world: World | None = None) -> Session:
    """Build a recipe's session, with a G that is `g_scale` times as wide as the recipe's."""
    run = make_endless_run(name, images, *settings)
    device = torch.device("cpu")
    spec = make_spec(run.data, images)
    pair = build_networks(run, spec, device)
    if g_scale > 1:
        wide = dataclasses.replace(run.nets, width=g_scale * run.nets.width)
        pair = to_device(run.device, dataclasses.replace(pair, g=wide.generator(spec)), device)
    return build_session(run, world or World.solo(), images, pair)


def measure(name: str, images: Dataset, g_scale: int, rounds: int) -> dict[str, Any]:
    """Compare the settings of SETTINGS_BY_CASE."""
    sessions = {case: make_session(name, images, g_scale, *settings) for case, settings in SETTINGS_BY_CASE.items()}
    torch.set_num_threads(sessions["async"].run.device.threads or torch.get_num_threads())
    contestants = {case: make_play_fn(session) for case, session in sessions.items()}
    times = interleave(contestants, rounds=rounds, steps=count_steps(BLOCK_S, contestants["async"]))
    session = sessions["async"]
    g_flops, d_flops = count_forward_flops(session.game)
    batch, d_steps = session.run.batch, session.run.d_steps
    alternating_flops = count_round_flops(g_flops, d_flops, batch, d_steps)
    async_flops = count_round_flops(g_flops, d_flops, batch, d_steps, session.role.extra_fakes_for_d)
    return {
        "g_over_d": g_flops / d_flops,
        "counted_speedup": alternating_flops / async_flops,
        "measured_speedup": speedup(times),
        "times": times.to_json("alternating"),
    }


def speedup(times: Times, baseline: str = "alternating") -> list[float]:
    """Return how many times faster than `baseline` async is: the median, and its confidence interval."""
    ratio = times.ratio("async", baseline)
    return [1 / ratio.median, 1 / ratio.high, 1 / ratio.low]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", metavar="F")
    options = parser.parse_args()
    machine = describe_machine()
    print(format_machine(machine))
    digits = load_data("digits", resolution=8)
    results: dict[str, Any] = {}
    for case, arguments in {
        "digits": ("digits", digits, 1),
        f"digits, G {WIDTH_FACTOR} times as wide": ("digits", digits, WIDTH_FACTOR),
        "fashion": ("fashion", random_dataset(32, 1), 1),
    }.items():
        results[case] = measure(*arguments, options.rounds)
        save_json(options.json, {"machine": machine, "cases": results})
    print(format_speedups(results))


def format_speedups(results: dict[str, Any]) -> str:
    """Format the counted and measured speed-ups of every case as a table."""
    rows = []
    for case, row in results.items():
        values = row["g_over_d"], row["counted_speedup"], *row["measured_speedup"]
        rows.append((case, *(f"{value:.3f}" for value in values)))
    return format_table(("case", "G / D", "counted", "measured", "low", "high"), rows)


if __name__ == "__main__":
    main()
