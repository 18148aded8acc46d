"""`paragan plan RECIPE --simulate`: many workers that differ, vary, leave and join."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paragan.core.errors import Unusable

COMPARED = (
    *("sync", "sync+int8+every=64", "async+int8", "gossip", "gossip+int8", "gossip+int8+local_steps=16"),
    *("gossip+topology=random-ring+int8", "async-gossip", "per-label"),
)
ALIKE = {"differ": 0.3, "speeds": 0.3, "jitter": 0.1}  # sigma of lognormals: rates, speeds, rounds
MOST = 200_000


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--simulate", action="store_true", help="many workers that differ, leave and join, one lane each")
    p.add_argument(
        "--leaving", type=float, default=0.0, metavar="X", help="share that leaves in an hour, simulated (0)"
    )
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of who is there and what happens; of the run (0)")


def check_simulated(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Unusable where something is asked for that only a simulation heeds, or only a prediction."""
    if not options.simulate:
        if options.leaving:
            raise Unusable("--leaving is of crowds: add --simulate, or leave it out")
        return
    odd = [f"--{name}" for name in ("kimg", "price", "memory", "margin") if getattr(options, name) is not None]
    odd += ["--batch auto"] * (options.batch == "auto") + [word for word in rest if word.startswith("--ramp")]
    if odd:
        raise Unusable(f"--simulate tells rates, of a lane a worker, and does not heed {odd[0]}: leave it out")


def simulate(options: argparse.Namespace, run: Any, links: Any) -> int:
    """Print what each strategy does with so many workers, one on each host."""
    from paragan.cli.plan_inputs import profile_for
    from paragan.config.resolve import load_images
    from paragan.plan.large_scale.fleet import Crowd
    from paragan.plan.large_scale.fleet import simulate as played
    from paragan.plan.large_scale.round_time import job_of
    from paragan.plan.select.candidates import strategy_of
    from paragan.train.trainer import resolved

    crowd = Crowd(links.ranks, **_rates(links), leaving=_leaving(options), seed=options.seed, **ALIKE)
    names = options.strategies.split(",") if options.strategies else COMPARED
    strategies = {name: strategy_of(name) for name in names}
    for strategy in strategies.values():
        strategy.check(links.ranks)
    images = load_images(run)
    run = resolved(run, images)
    profile, source = profile_for(options.profile, run, images)
    lane = run.batch // run.lanes
    job = job_of(dataclasses.replace(run, batch=lane * links.ranks, lanes=links.ranks), profile, links.ranks)
    seen = {name: played(strategy, job, crowd) for name, strategy in strategies.items()}
    noise = [f"note: {line}" for line in _noise(profile, lane * links.ranks)]
    head = f"{run.recipe}, {links.told()}; {lane} images a worker (a lane); one worker: {source}"
    lines = [head, f"{crowd.leaving:.0%} of them leave in an hour, and as many join", "", *table(seen), *noise]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    if options.json:
        rows = {name: _finite(dataclasses.asdict(one)) for name, one in seen.items()}
        Path(options.json).write_text(json.dumps({"crowd": dataclasses.asdict(crowd), "rows": rows}, indent=1) + "\n")
    return 0


def table(seen: dict[str, Any]) -> list[str]:
    """What was simulated, a line each."""
    from paragan.plan.select.compare import told_bytes

    heads = ("images/s", "rounds/h", "sent an hour", "computing", "apart", "mixed after", "broken")
    lines = [f"{'strategy':<36}" + "".join(f"{head:>14}" for head in heads)]
    for name, one in seen.items():
        if not one.rounds:
            lines.append(f"{name:<36}{'no round ends: somebody leaves before':>40}")
            continue
        apart = "never meet" if math.isinf(one.apart) else f"{one.apart:.2f} steps"
        cells = (f"{one.images_per_s:,.0f}", f"{one.rounds_per_h:,.0f}", told_bytes(one.sent_bytes_per_h))
        cells += (f"{one.computing:.0%}", apart, f"{one.mixes:,.3g}", f"{one.broken:.2g} x")
        lines.append(f"{name:<36}" + "".join(f"{cell:>14}" for cell in cells))
    return lines


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no number for what never comes."""
    return {name: None if value == math.inf else value for name, value in row.items()}


def _rates(links: Any) -> dict[str, float]:
    if not 2 <= links.hosts <= MOST:
        raise Unusable(f"--hosts {links.hosts}: 2 to {MOST:,} can be simulated")
    if links.pairs or isinstance(links.up, list) or isinstance(links.down, list):
        raise Unusable("--simulate draws how links differ: give one rate and latency, '100/20 Mbit/s, 40 ms'")
    if links.ranks_per_host != 1:
        raise Unusable(f"--simulate has a worker on each host: leave --ranks-per-host {links.ranks_per_host} out")
    up, down = links.port(0)
    return {"up": up, "down": down, "latency": links.latency or 0.0}


def _leaving(options: argparse.Namespace) -> float:
    if not 0 <= options.leaving < 1:
        raise Unusable(f"--leaving {options.leaving:g}: a share from 0 to below 1, as 0.01 is")
    if not 0 <= options.seed < 2**63:
        raise Unusable(f"--seed {options.seed} must be 0 or more, and less than 2^63")
    return options.leaving


def _noise(profile: Any, batch: int) -> tuple[str, ...]:
    from paragan.plan.select.convergence_limits import noise_of

    return noise_of(profile, batch)
