"""Limits beyond which a strategy is not known to converge as well, in words (docs/planning.md).

Within them learning_cost.py says how many more images a strategy needs. Beyond them that was not measured, or quality
is known to suffer.
"""

from __future__ import annotations

import math
from typing import Any

from paragan.comm.topology import Topology, contraction, contraction_by_spectrum
from paragan.config.run import Run
from paragan.plan.profile.profile import Profile
from paragan.plan.select.learning_cost import DELAY_FACTORS, FINE_WIRES, PERIOD_FACTORS, TEAM_FACTORS, WIRE_FACTORS

MAX_REMAINING_DISTANCE = 0.9  # fraction of the distance between ranks that may remain after a step
MAX_STALENESS_ROUNDS = max(TEAM_FACTORS)  # mean age of the opponent that a player uses
MAX_GOSSIP_STALENESS_ROUNDS = 1  # mean age of a neighbor's parameters (docs/measurements/clock.md)
MAX_DENSE_RANKS = 512  # up to which the mixing matrix is analyzed; beyond, formulas are used


def find_limits(strategy: Any, ranks: int, staleness: float) -> tuple[str, ...]:
    """List the limits that a strategy exceeds on `ranks` ranks. `staleness` is the predicted one, in rounds."""
    limits = [_update_limit(strategy)]
    if ranks > 1 or strategy.step_period > 1:
        limits += [_period_limit(strategy), _outer_limit(strategy), _delay_limit(strategy)]
    if ranks > 1:
        limits += [_wire_limit(strategy), _consensus_limit(strategy, ranks), _staleness_limit(strategy, staleness)]
    return tuple(limit for limit in limits if limit)


def noise_warnings(profile: Profile, batch: int) -> tuple[str, ...]:
    """Warn of a batch that is larger than the noise scale of a player's gradient."""
    return tuple(
        f"--batch {batch} is {_format_ratio(batch, noise.images)} the noise scale of {name}'s gradient "
        f"({noise.images:.3g} images after {noise.kimg:.3g} kimg): more images per step save few steps"
        for name, noise in profile.noise_scale.items()
        if batch > noise.images
    )


def ramp_warnings(run: Run) -> tuple[str, ...]:
    """Warn that only the first stage of a ramp is predicted."""
    if not run.ramp:
        return ()
    last = run.ramp[-1][1]
    return (
        f"--ramp: only the first stage, --batch {run.batch}, is predicted. For the last, plan --batch {last} without "
        "--ramp",
    )


def _format_ratio(batch: int, noise: float) -> str:
    return f"{batch / noise:.2g} times" if noise else "beyond"  # 0: the gradients of all lanes are equal


def _wire_limit(strategy: Any) -> str:
    wire = strategy.wire
    if not wire.lossy:
        return ""
    if not strategy.error_feedback:
        return f"no error feedback: what the {wire.name} wire loses is never sent"
    is_measured = wire.name in FINE_WIRES or wire.name in WIRE_FACTORS
    return "" if is_measured else f"what the {wire.name} wire costs in quality was not measured"


def _update_limit(strategy: Any) -> str:
    return "plain gradient steps (paper_update) learn less than Adam" if strategy.requires_sgd else ""


def _period_limit(strategy: Any) -> str:
    period = strategy.sync_period
    longest = max(PERIOD_FACTORS[strategy.sync_mode])
    if period <= longest:
        return ""
    return f"a period of {period:,} rounds: periods above {longest:g} were not measured"


def _outer_limit(strategy: Any) -> str:
    return "" if strategy.outer_is_mean else "what the outer optimizer costs in quality was not measured"


def _delay_limit(strategy: Any) -> str:
    longest = max(DELAY_FACTORS)
    if strategy.rounds_in_flight <= longest:
        return ""
    return f"a delay of {strategy.rounds_in_flight:,} rounds: delays above {longest:g} were not measured"


def _consensus_limit(strategy: Any, ranks: int) -> str:
    topology: Topology | None = strategy.gossip_topology
    if topology is None or strategy.consensus_tolerance:
        return ""
    remaining = contraction(topology, ranks) if ranks <= MAX_DENSE_RANKS else contraction_by_spectrum(topology, ranks)
    remaining **= strategy.rounds / strategy.sync_period
    if remaining <= MAX_REMAINING_DISTANCE:
        return ""
    steps = math.inf if remaining >= 1 else math.log(0.01) / math.log(remaining)
    return (
        f"{topology.name} leaves {remaining:.3g} of the distance between {ranks} ranks after a step, and 1 % after "
        f"{steps:,.0f}"
    )


def _staleness_limit(strategy: Any, staleness: float) -> str:
    is_gossip = strategy.gossip_topology is not None
    if staleness <= (MAX_GOSSIP_STALENESS_ROUNDS if is_gossip else MAX_STALENESS_ROUNDS):
        return ""
    subject = "neighbors' parameters are" if is_gossip else "the opponent is"
    return f"{subject} {staleness:.2g} rounds old on average, which reduces quality"
