"""Count the images that a strategy needs: how many times those of its exact baseline, for the same score.

    images_needed(parse_strategy("sync+sync_period=4"), ranks=4, staleness=0.0)    # 1.3: thirty percent more images

The baseline of a strategy is the exact one with the same optimizers: `sync` for compressed gradients and longer
periods, CP-OAdam for gossip, `sync` with optimistic optimizers for `async`. The tables below are how many times the
baseline's images a strategy needed to reach the Fréchet distance with which it ended, on the worse of two small data
sets. They are computed from benchmarks/results/ by `python -m benchmarks.quality.images_needed`, and a test compares
them. Between two rows they are interpolated. Periods, delays and ages beyond the last row are a limit
(convergence_limits.py); more ranks of gossip count as the last row. Factors of several properties are multiplied, which
is our assumption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

PERIOD_FACTORS: Mapping[str, Mapping[float, float]] = {  # by `sync_mode`: rounds in a period
    "parameters": {1: 1.0, 2: 1.29, 4: 1.29, 8: 1.28, 32: 1.31, 128: 1.36},
    "gradients": {1: 1.0, 2: 1.83},
    "accumulate": {1: 1.0, 2: 3.23},
}
DELAY_FACTORS: Mapping[float, float] = {0: 1.0, 8: 1.07}  # rounds in flight, with a period of 32 and four fragments
GOSSIP_FACTORS: Mapping[float, float] = {1: 1.0, 4: 1.36, 8: 1.6}  # ranks
TEAM_FACTORS: Mapping[float, float] = {0: 1.67, 0.5: 2.39, 1: 3.47}  # mean age of the opponent, in rounds
WIRE_FACTORS: Mapping[str, float] = {"int8": 1.0, "int4": 1.0, "int2": 1.34, "sign": 1.62}
FINE_WIRES = ("exact", "bf16", "fp16")  # finer than int8: taken to cost nothing


def images_needed(strategy: Any, ranks: int, staleness: float) -> float:
    """Return how many times the images of its baseline a strategy needs.

    Args:
        strategy: of the run.
        ranks: of the run.
        staleness: the predicted mean age of the opponent that a player uses, in rounds.
    """
    factor = 1.0
    if strategy.reuses_fakes:
        factor *= interpolate(TEAM_FACTORS, staleness)
    is_alone = ranks == 1 or (ranks == 2 and strategy.splits_ranks)  # with nobody to exchange gradients with
    if not is_alone or strategy.step_period > 1:
        factor *= interpolate(PERIOD_FACTORS[strategy.sync_mode], strategy.sync_period)
    if is_alone:
        return factor
    factor *= WIRE_FACTORS.get(strategy.wire.name, 1.0) * interpolate(DELAY_FACTORS, strategy.rounds_in_flight)
    if strategy.gossip_topology is not None:
        factor *= interpolate(GOSSIP_FACTORS, ranks)
    return factor


def interpolate(factors: Mapping[float, float], x: float) -> float:
    """Interpolate a table, linearly in log2(1 + x); x beyond the table counts as its last row."""
    rows = sorted(factors.items())
    (x0, f0) = rows[0]
    for x1, f1 in rows[1:]:
        if x <= x1:
            weight = (_scale(x) - _scale(x0)) / (_scale(x1) - _scale(x0))
            return f0 + max(0.0, weight) * (f1 - f0)
        x0, f0 = x1, f1
    return f0


def _scale(x: float) -> float:
    return math.log2(1 + x)
