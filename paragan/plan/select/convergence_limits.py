"""What a strategy costs of what is learnt, in words: where statistics, not systems, limit (docs/planning.md).

None of it is predicted in scores: these are bounds beyond which quality was seen, or is known, to suffer.
"""

from __future__ import annotations

import math
from typing import Any

from paragan.comm.topology import Topology, contraction
from paragan.config.run import Run
from paragan.plan.large_scale.mixing_rate import contraction_factor
from paragan.plan.profile.profile import Profile

MAX_REMAINING_DISTANCE = 0.9  # of the distance between ranks may be left after a step
MAX_STALENESS_ROUNDS = 1.5  # rounds: the mean age of what a player sees of the other
MAX_GOSSIP_STALENESS_ROUNDS = 16  # steps that a neighbour's parameters may be late
MAX_SYNC_PERIOD = 4  # that ranks take on their own
COARSE_WIRES = ("int2", "sign")  # wires that cost quality where it was measured (docs/quantized.md)
MAX_DENSE_RANKS = 512  # ranks up to which a mixing matrix is looked at itself


def find_limits(strategy: Any, ranks: int, staleness: float) -> tuple[str, ...]:
    """staleness: as predicted, in rounds."""
    if ranks == 1:
        return ()
    found = [
        _wire_limit(strategy),
        _period_limit(strategy),
        _consensus_limit(strategy, ranks),
        _staleness_limit(strategy, staleness),
    ]
    return tuple(limit for limit in found if limit)


def noise_warnings(profile: Profile, batch: int) -> tuple[str, ...]:
    """Of a batch beyond what noise pays for."""
    return tuple(
        f"--batch {batch} is {_format_ratio(batch, noise.images)} the noise scale of {name}'s gradient "
        f"({noise.images:.3g} images after {noise.kimg:.3g} kimg): more images a step save few steps"
        for name, noise in profile.noise_scale.items()
        if batch > noise.images
    )


def ramp_warnings(run: Run) -> tuple[str, ...]:
    """That stages beyond the first are not predicted."""
    if not run.ramp:
        return ()
    told = f"predicted is --batch {run.batch}, the first stage of the ramp"
    return (f"{told}: for the last, plan --batch {run.ramp[-1][1]} without --ramp",)


def _format_ratio(batch: int, noise: float) -> str:
    return f"{batch / noise:.2g} times" if noise else "beyond"  # gradients of all lanes may be alike


def _wire_limit(strategy: Any) -> str:
    wire = strategy.wire
    if not wire.lossy:
        return ""
    if wire.name in COARSE_WIRES:
        return f"the {wire.name} wire costs quality where it was measured"
    return "" if strategy.error_feedback else f"what the {wire.name} wire loses is never sent: no error feedback"


def _period_limit(strategy: Any) -> str:
    steps = strategy.sync_period
    return f"ranks take {steps} steps on their own, and drift apart" if steps > MAX_SYNC_PERIOD else ""


def _consensus_limit(strategy: Any, ranks: int) -> str:
    topology: Topology | None = strategy.gossip_topology
    if topology is None or strategy.consensus_tolerance:
        return ""
    left = contraction(topology, ranks) if ranks <= MAX_DENSE_RANKS else contraction_factor(topology, ranks)
    left **= strategy.rounds / strategy.sync_period
    if left <= MAX_REMAINING_DISTANCE:
        return ""
    steps = math.inf if left >= 1 else math.log(0.01) / math.log(left)
    return (
        f"{topology.name} leaves {left:.3g} of the distance between {ranks} ranks after a step: 1 % after {steps:,.0f}"
    )


def _staleness_limit(strategy: Any, staleness: float) -> str:
    lags = strategy.gossip_topology is not None
    if staleness <= (MAX_GOSSIP_STALENESS_ROUNDS if lags else MAX_STALENESS_ROUNDS):
        return ""
    seen = "what ranks hear of neighbours" if lags else "what a player sees of the other"
    return f"{seen} is {staleness:.2g} rounds old on average, which costs quality"
