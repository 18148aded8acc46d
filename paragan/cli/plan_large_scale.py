"""`paragan plan RECIPE --large-scale`: many workers that differ, vary, leave and join."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paragan.core.errors import UsageError

if TYPE_CHECKING:
    from paragan.config.run import Run
    from paragan.plan.links import Links
    from paragan.plan.profile.profile import Profile

DEFAULT_STRATEGIES = (
    *("sync", "sync+int8+sync_period=64", "async+int8", "gossip", "gossip+int8", "gossip+int8+sync_period=16"),
    *("gossip+topology=random-ring+int8", "async-gossip", "per-label"),
)
WORKER_VARIATION = {
    "rate_sigma": 0.3,
    "speed_sigma": 0.3,
    "jitter_sigma": 0.1,
}  # sigma of lognormals: rates, speeds, rounds
MAX_HOSTS = 200_000


def add_large_scale_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--large-scale", action="store_true", help="many workers that differ, leave and join, one lane each")
    p.add_argument("--churn", type=float, default=0.0, metavar="X", help="share that leaves in an hour, simulated (0)")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of who is there and what happens; of the run (0)")


def check_large_scale_options(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Unusable where something is asked for that only a simulation heeds, or only a prediction."""
    if not options.large_scale:
        if options.churn:
            raise UsageError("--churn is of crowds: add --large-scale, or leave it out")
        return
    odd = [f"--{name}" for name in ("kimg", "price", "memory", "margin") if getattr(options, name) is not None]
    odd += ["--batch auto"] * (options.batch == "auto") + [word for word in rest if word.startswith("--ramp")]
    if odd:
        raise UsageError(f"--large-scale tells rates, of a lane a worker, and does not heed {odd[0]}: leave it out")


def print_simulation(options: argparse.Namespace, run: Run, links: Links) -> int:
    """Print what each strategy does with so many workers, one on each host."""
    from paragan.cli.plan_inputs import load_or_measure_profile
    from paragan.plan.large_scale.fleet import FleetConfig
    from paragan.plan.large_scale.fleet import simulate_fleet as played
    from paragan.plan.large_scale.round_time import make_worker_round
    from paragan.plan.select.candidates import parse_strategy
    from paragan.train.prepare import prepare

    crowd = FleetConfig(
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
    lane = run.batch // run.lanes
    job = make_worker_round(dataclasses.replace(run, batch=lane * links.ranks, lanes=links.ranks), profile, links.ranks)
    seen = {name: played(strategy, job, crowd) for name, strategy in strategies.items()}
    noise = [f"note: {line}" for line in _noise_notes(profile, lane * links.ranks)]
    head = f"{run.recipe}, {links.describe()}; {lane} images a worker (a lane); one worker: {source}"
    lines = [
        head,
        f"{crowd.churn_per_h:.0%} of them leave in an hour, and as many join",
        "",
        *format_results(seen),
        *noise,
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if options.json:
        rows = {name: _inf_to_none(dataclasses.asdict(one)) for name, one in seen.items()}
        Path(options.json).write_text(json.dumps({"fleet": dataclasses.asdict(crowd), "rows": rows}, indent=1) + "\n")
    return 0


def format_results(results: dict[str, Any]) -> list[str]:
    """What was simulated, a line each."""
    from paragan.plan.select.compare import format_bytes

    heads = ("images/s", "rounds/h", "sent an hour", "computing", "apart", "mixed after", "broken")
    lines = [f"{'strategy':<36}" + "".join(f"{head:>14}" for head in heads)]
    for name, one in results.items():
        if not one.rounds:
            lines.append(f"{name:<36}{'no round ends: somebody leaves before':>40}")
            continue
        apart = "never meet" if math.isinf(one.replica_drift) else f"{one.replica_drift:.2f} steps"
        cells = (f"{one.images_per_s:,.0f}", f"{one.rounds_per_h:,.0f}", format_bytes(one.sent_bytes_per_h))
        cells += (f"{one.compute_share:.0%}", apart, f"{one.mixing_rounds:,.3g}", f"{one.failed_attempts:.2g} x")
        lines.append(f"{name:<36}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def _inf_to_none(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for what never comes."""
    return {name: None if value == math.inf else value for name, value in row.items()}


def _host_link(links: Links) -> dict[str, float]:
    if not 2 <= links.hosts <= MAX_HOSTS:
        raise UsageError(f"--hosts {links.hosts}: 2 to {MAX_HOSTS:,} can be simulated")
    if links.pairs or isinstance(links.up, list) or isinstance(links.down, list):
        raise UsageError("--large-scale draws how links differ: give one rate and latency, '100/20 Mbit/s, 40 ms'")
    if links.ranks_per_host != 1:
        raise UsageError(f"--large-scale has a worker on each host: leave --ranks-per-host {links.ranks_per_host} out")
    up, down = links.port_rates(0)
    return {"up_rate": up, "down_rate": down, "latency_s": links.latency or 0.0}


def _checked_churn(options: argparse.Namespace) -> float:
    if not 0 <= options.churn < 1:
        raise UsageError(f"--churn {options.churn:g}: a share from 0 to below 1, as 0.01 is")
    if not 0 <= options.seed < 2**63:
        raise UsageError(f"--seed {options.seed} must be 0 or more, and less than 2^63")
    return options.churn


def _noise_notes(profile: Profile, batch: int) -> tuple[str, ...]:
    from paragan.plan.select.convergence_limits import noise_warnings

    return noise_warnings(profile, batch)
