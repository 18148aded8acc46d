"""What a mix leaves of the distance between many ranks, without their matrix: comm/topology.contraction by formula.

Circulant graphs have the eigenvalues sum_k w_k exp(-2 pi i j k / n); the others are in closed form.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paragan.core.errors import UsageError


def contraction_factor(topology: Any, ranks: int) -> float:
    """After a step, at worst (of random graphs: the root mean square)."""
    formula = CONTRACTION_FORMULAS.get(topology.name)
    if formula is None:
        raise UsageError(f"strategy.topology={topology.name}: there is no formula for it on {ranks} ranks")
    misfit = topology.unsupported_reason(ranks)
    if misfit:
        raise UsageError(f"strategy.topology={topology.name} on {ranks} ranks: {misfit}")
    return formula(ranks) if ranks > 1 else 0.0


def rounds_to_contract(remaining: float, strategy: Any, ranks: int) -> float:
    """Rounds of gossip until so much of a distance between ranks is left."""
    left = contraction_factor(strategy.topology, ranks) ** strategy.rounds
    if left == 0:  # the exact mean, once all graphs of a period have had their turn
        return math.ceil(max(1, strategy.topology.period(ranks)) / strategy.rounds) * strategy.sync_period
    return max(1.0, math.log(remaining) / math.log(left) if left < 1 else math.inf) * strategy.sync_period


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def _circulant_phases(n: int, offset: int) -> Any:
    """exp(-2 pi i j offset / n) of every j but 0."""
    return np.exp(-2j * np.pi * (np.arange(1, n) * offset % n) / n)


def _ring(n: int) -> float:
    return max(abs(1 + 2 * math.cos(2 * math.pi * j / n)) / 3 for j in (1, n // 2)) if n > 2 else 0.0


def _one_peer(n: int) -> float:
    product = np.ones(n - 1, complex)
    for hop in range(_ceil_log2(n)):
        product *= (1 + _circulant_phases(n, 1 << hop)) / 2
    rest = float(np.abs(product).max())
    return 0.0 if rest < 1e-12 else rest ** (1 / _ceil_log2(n))


def _exponential(n: int) -> float:
    hops = _ceil_log2(n)
    total = 1 + sum(_circulant_phases(n, 1 << hop) for hop in range(hops))
    return float(np.abs(total).max()) / (hops + 1)


def _hypercube(n: int) -> float:
    hops = _ceil_log2(n)
    return abs(hops - 1) / (hops + 1)


def _random_graph(n: int, squares: float) -> float:
    """Random relabellings of a graph whose weights have this sum of squares."""
    return math.sqrt(max(0.0, (squares - 1) / (n - 1)))


CONTRACTION_FORMULAS: dict[str, Any] = {
    "ring": _ring,
    "one-peer": _one_peer,
    "exponential": _exponential,
    "hypercube": _hypercube,
    "complete": lambda n: 0.0,
    "star": lambda n: 1 - 1 / n if n > 2 else 0.0,
    "random-ring": lambda n: _random_graph(n, n / 3) if n > 2 else 0.0,
    "matching": lambda n: _random_graph(n, n / 2 if n % 2 == 0 else (n + 1) / 2),
}
