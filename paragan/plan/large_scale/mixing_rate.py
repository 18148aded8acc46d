"""How fast gossip mixes, for any number of ranks: `comm.topology.contraction` by formula instead of by matrix.

Circulant graphs have the eigenvalues sum_k w_k exp(-2 pi i j k / n); those of the others are known in closed form.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from paragan.core.errors import UsageError


def contraction_factor(topology: Any, ranks: int) -> float:
    """Return the fraction of the distance between ranks that remains after a step, at worst.

    For random graphs it is the root mean square.

    Raises:
        UsageError: there is no formula for the topology, or it does not support this number of ranks.
    """
    formula = CONTRACTION_FORMULAS.get(topology.name)
    if formula is None:
        raise UsageError(
            f"strategy.topology={topology.name}: no formula for {ranks} ranks. Use {', '.join(CONTRACTION_FORMULAS)}"
        )
    reason = topology.unsupported_reason(ranks)
    if reason:
        raise UsageError(f"strategy.topology={topology.name} on {ranks} ranks: {reason}")
    return formula(ranks) if ranks > 1 else 0.0


def rounds_to_contract(remaining: float, strategy: Any, ranks: int) -> float:
    """Return the rounds of gossip until the fraction `remaining` of a distance between ranks is left."""
    factor = contraction_factor(strategy.topology, ranks) ** strategy.rounds
    if factor == 0:  # the exact mean, after all graphs of a period
        return math.ceil(max(1, strategy.topology.period(ranks)) / strategy.rounds) * strategy.sync_period
    if factor >= 1:
        return math.inf
    return max(1.0, math.log(remaining) / math.log(factor)) * strategy.sync_period


def _ceil_log2(n: int) -> int:
    return (n - 1).bit_length()


def _circulant_phases(n: int, offset: int) -> Any:
    """Return exp(-2 pi i j offset / n) for j from 1 to n - 1."""
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
    """For random relabellings of a graph whose weights have this sum of squares."""
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
