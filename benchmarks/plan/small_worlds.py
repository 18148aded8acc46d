"""Compare the simulation of many workers with the prediction for few: `python -m benchmarks.plan.small_worlds`.

    python -m benchmarks.plan.small_worlds [--json F]    a minute

`paragan plan --large-scale` computes rounds by closed formulas (plan/large_scale/), `paragan plan` message by message
(plan/predict/). Both are asked for the images per second of equal workers on equal links, from links where latency
decides to links where bandwidth does. Nothing is timed: a worker of the recipe `digits` is assumed to take 20 ms for 16
images in G's turn and 30 ms in D's, whatever its networks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.lib.timing import describe_machine, format_machine, format_table, save_json
from paragan.plan.large_scale.fleet import FleetConfig, simulate_fleet
from paragan.plan.large_scale.round_time import make_worker_round
from paragan.plan.links import parse_links
from paragan.plan.predict.predict import predict
from paragan.plan.profile.profile import NUM_READY_PARTS, DeviceInfo, Profile, TurnProfile
from paragan.plan.select.candidates import parse_strategy
from paragan.recipes import get_recipe

LINKS = (
    "4 hosts, 100 Mbit/s, 0 ms",
    "4 hosts, 100 Mbit/s, 10 ms",
    "16 hosts, 20 Mbit/s, 40 ms",
    "16 hosts, 1 Gbit/s, 50 us",
)
PARAMETERS = (30_000, 100_000, 300_000, 1_000_000, 3_000_000)  # of each network
STRATEGIES = (
    "sync",
    "sync+int8",
    "sync+sync_period=4",
    "gossip",
    "gossip+int8",
    "gossip+topology=ring",
    "gossip+topology=random-ring",
    "async",
)
BATCH, ROUNDS = 128, 16


def make_turn_profile(images: int, seconds: float) -> TurnProfile:
    """Assume that gradients are ready in the last half of the passes, which are 90 % of a turn."""
    ready_s = tuple(seconds * (0.4 + 0.5 * (i + 1) / NUM_READY_PARTS) for i in range(NUM_READY_PARTS))
    return TurnProfile(images, ready_s, 0.9 * seconds, seconds)


def make_profile(parameters: int) -> Profile:
    """Return the profile of the assumed worker, with as many parameters in G and in D."""
    return Profile(
        recipe="digits",
        network_digest="",
        device=DeviceInfo("cpu", "assumed", 1, "float32", 1e10, 8 << 30, "", ""),
        num_params=(parameters, parameters),
        flops_per_image=1e6,
        g=(make_turn_profile(16, 0.02), make_turn_profile(64, 0.08)),
        d=(make_turn_profile(16, 0.03), make_turn_profile(64, 0.12)),
    )


def compare() -> Iterator[dict[str, Any]]:
    recipe = get_recipe("digits")
    data = dataclasses.replace(recipe.data, resolution=8, channels=1)
    for text in LINKS:
        links = parse_links(text)
        fleet = FleetConfig(links.hosts, *links.port_rates(0), links.link_between(0, 1).latency)
        for parameters in PARAMETERS:
            profile = make_profile(parameters)
            for name in STRATEGIES:
                run = dataclasses.replace(recipe, data=data, lanes=16, batch=BATCH, strategy=parse_strategy(name))
                worker = make_worker_round(run, profile, links.hosts)
                simulated = simulate_fleet(run.strategy, worker, fleet, rounds=ROUNDS).images_per_s
                predicted = predict(run, profile, links).images_per_s
                yield {
                    "links": text,
                    "parameters": parameters,
                    "strategy": name,
                    "predicted": predicted,
                    "simulated": simulated,
                    "error": simulated / predicted - 1,
                }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": describe_machine(), "rows": list(compare())}
    print(format_machine(result["machine"]))
    for links in LINKS:
        errors = {(row["strategy"], row["parameters"]): row["error"] for row in result["rows"] if row["links"] == links}
        rows = [[name, *(f"{errors[name, n]:+.1%}" for n in PARAMETERS)] for name in STRATEGIES]
        print(f"\n{format_table([links, *(f'{n:,}' for n in PARAMETERS)], rows)}")
    save_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
