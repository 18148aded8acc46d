"""`paragan plan RECIPE --large-scale`: simulate many workers that differ, vary, leave and join."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.plan.large_scale.fleet import FleetResult
    from paragan.plan.links import Links

DEFAULT_STRATEGIES = (
    *("sync", "sync+int8+sync_period=64", "async+int8", "gossip", "gossip+int8", "gossip+int8+sync_period=16"),
    *("gossip+topology=random-ring+int8", "async-gossip", "per-label"),
)
WORKER_VARIATION = {"rate_sigma": 0.3, "speed_sigma": 0.3, "jitter_sigma": 0.1}  # fields of FleetConfig
MAX_HOSTS = 200_000


def add_large_scale_options(p: argparse.ArgumentParser) -> None:
    """Add the options of --large-scale."""
    p.add_argument("--large-scale", action="store_true", help="simulate workers with one lane that differ, leave, join")
    p.add_argument("--churn", type=float, default=0.0, metavar="X", help="fraction of them that leaves per hour (0)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the simulation, and of the run (0)")


def check_large_scale_options(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Check that all options have an effect.

    Raises:
        UsageError: an option is only for --large-scale, or not for it.
    """
    if not options.large_scale:
        if options.churn:
            raise UsageError(f"--churn {options.churn:g}: it is for --large-scale. Add --large-scale, or leave it out")
        return
    unused = [f"--{name}" for name in ("kimg", "price", "memory", "margin") if getattr(options, name) is not None]
    if options.batch == "auto":
        unused.append("--batch auto")
    unused += [word for word in rest if word.startswith("--ramp")]
    if unused:
        raise UsageError(f"{unused[0]}: it has no effect with --large-scale, which simulates rates. Leave it out")


def print_simulation(options: argparse.Namespace, run: Run, links: Links) -> int:
    """Simulate each strategy with one worker on each host, and print the results."""
    from paragan.cli.plan_inputs import load_or_measure_profile
    from paragan.plan.large_scale.fleet import FleetConfig, simulate_fleet
    from paragan.plan.large_scale.round_time import make_worker_round
    from paragan.plan.select.candidates import parse_strategy
    from paragan.plan.select.convergence_limits import noise_warnings
    from paragan.train.prepare import prepare

    config = FleetConfig(
        links.ranks, **_host_link(links), churn_per_h=_checked_churn(options), seed=options.seed, **WORKER_VARIATION
    )
    names = options.strategies.split(",") if options.strategies else DEFAULT_STRATEGIES
    strategies = {name: parse_strategy(name) for name in names}
    for strategy in strategies.values():
        strategy.check(links.ranks)
    prepared = prepare(run)
    run = prepared.run
    images = prepared.dataset
    profile, source = load_or_measure_profile(options.profile, run, images)
    lane_images = run.batch // run.lanes
    fleet_run = dataclasses.replace(run, batch=lane_images * links.ranks, lanes=links.ranks)
    worker_round = make_worker_round(fleet_run, profile, links.ranks)
    results = {name: simulate_fleet(strategy, worker_round, config) for name, strategy in strategies.items()}
    lines = [
        f"{run.recipe}, {links.describe()}; {lane_images} images per worker (a lane); one worker: {source}",
        f"{config.churn_per_h:.0%} of them leave per hour, and as many join",
        "",
        *format_results(results),
        *(f"note: {warning}" for warning in noise_warnings(profile, fleet_run.batch)),
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if options.json:
        rows = {name: _inf_to_none(dataclasses.asdict(result)) for name, result in results.items()}
        record = {"fleet": dataclasses.asdict(config), "rows": rows}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def format_results(results: Mapping[str, FleetResult]) -> list[str]:
    """Format one line per strategy."""
    from paragan.plan.cost import format_bytes

    heads = ("images/s", "rounds/h", "sent per hour", "computing", "drift", "mixed after", "failed")
    lines = [f"{'strategy':<36}" + "".join(f"{head:>14}" for head in heads)]
    for name, result in results.items():
        if not result.rounds:
            lines.append(f"{name:<36}{'no round ends: a worker leaves before':>40}")
            continue
        cells = (
            f"{result.images_per_s:,.0f}",
            f"{result.rounds_per_h:,.0f}",
            format_bytes(result.sent_bytes_per_h),
            f"{result.compute_share:.0%}",
            "unbounded" if math.isinf(result.replica_drift) else f"{result.replica_drift:.2f} steps",
            f"{result.mixing_rounds:,.3g}",
            f"{result.failed_attempts:.2g} x",
        )
        lines.append(f"{name:<36}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def _inf_to_none(row: dict[str, Any]) -> dict[str, Any]:
    """Replace infinity, which JSON does not have."""
    return {name: None if value == math.inf else value for name, value in row.items()}


def _host_link(links: Links) -> dict[str, float]:
    """Return rates and latency of a worker as fields of FleetConfig."""
    if not 2 <= links.hosts <= MAX_HOSTS:
        raise UsageError(f"--hosts {links.hosts}: it cannot be simulated. Use 2 to {MAX_HOSTS:,}")
    if links.pairs or isinstance(links.up, list) or isinstance(links.down, list):
        raise UsageError("--links: --large-scale draws different links itself. Use one line: '100/20 Mbit/s, 40 ms'")
    if links.ranks_per_host != 1:
        raise UsageError(
            f"--ranks-per-host {links.ranks_per_host}: --large-scale has one worker per host. Leave it out"
        )
    up, down = links.port_rates(0)
    return {"up_rate": up, "down_rate": down, "latency_s": links.latency or 0.0}


def _checked_churn(options: argparse.Namespace) -> float:
    if not 0 <= options.churn < 1:
        raise UsageError(f"--churn {options.churn:g}: it must be from 0 to below 1. Use 0.01")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed {options.seed}: it must be from 0 to below 2^63")
    return options.churn
