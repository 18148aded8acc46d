"""Topologies: who averages with whom, with what weight. Pure functions of (size, step).

x_i <- sum_j W_ij x_j with a doubly stochastic W keeps the mean over ranks and draws everyone towards it. What is left
of the distance to the mean after a step is `contraction`: the second singular value of W; where W changes from step to
step the geometric mean over a period; where it is random, the root of the second eigenvalue of E[W'W] (Boyd et al.
2006).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from paragan.core.errors import UsageError
from paragan.core.rng import philox_generator
from paragan.core.schema import config_class, name_shorthand

Matrix = NDArray[np.float64]


class Topology(Protocol):
    """A mixing matrix for every step."""

    @property
    def name(self) -> str: ...

    def unsupported_reason(self, size: int) -> str:
        """What keeps it from so many ranks, in words; empty where it fits."""
        ...

    def period(self, size: int) -> int:
        """After how many steps the matrices repeat; 0: never, they are random."""
        ...

    def matrix(self, size: int, step: int) -> Matrix:
        """[size, size] doubly stochastic: row i is what rank i hears."""
        ...


def check_topology(topology: Topology, size: int) -> None:
    """Unusable where a topology does not fit so many ranks, with those that do."""
    misfit = topology.unsupported_reason(size)
    if misfit:
        others = [t.name for t in BUILTIN_TOPOLOGIES if not t.unsupported_reason(size)]
        there = ", ".join(others)
        raise UsageError(f"strategy.topology={topology.name} on {size} ranks: {misfit}; for {size} there are {there}")


def restrict_to(topology: Topology, original_ranks: Sequence[int], initial_size: int) -> Topology:
    """The topology of those who are left in `seats` of the `began` ranks it was chosen for: the same one where it
    fits so many, else what is left of its links, or a ring where those do not connect everyone."""
    size = len(original_ranks)
    if size == initial_size or not topology.unsupported_reason(size):
        check_topology(topology, size)
        return topology
    matrices = [topology.matrix(initial_size, step) for step in range(topology.period(initial_size))]
    linked = np.add.reduce(matrices)[np.ix_(original_ranks, original_ranks)]
    left = InducedSubgraph(tuple((i, j) for i in range(size) for j in range(i) if linked[i, j] or linked[j, i]))
    return left if size == 1 or contraction(left, size) < 1 - 1e-9 else Ring()


def is_static(topology: Topology, size: int) -> bool:
    """Whether its links are the same at every step, and carry as much both ways."""
    return topology.period(size) == 1 and np.allclose(topology.matrix(size, 0), topology.matrix(size, 0).T)


@dataclass(frozen=True)
class Neighbors:
    """What one rank does in one step: to whom it sends, whom it hears with what weight, and its own weight."""

    send_to: tuple[int, ...]
    recv_from: dict[int, float]
    self_weight: float


@lru_cache(maxsize=4096)
def neighbors(topology: Topology, size: int, rank: int, step: int) -> Neighbors:
    """A rank's part of W(step)."""
    period = topology.period(size)
    w = topology.matrix(size, step % period if period else step)
    others = [j for j in range(size) if j != rank]
    hears = {j: float(w[rank, j]) for j in others if w[rank, j]}
    return Neighbors(tuple(j for j in others if w[j, rank]), hears, float(w[rank, rank]))


def contraction(topology: Topology, size: int) -> float:
    """What remains of the distance to the mean after a step, at worst (for random ones: in the root mean square)."""
    if size == 1:
        return 0.0
    period = topology.period(size)
    if not period:  # random relabellings: E[W'W] commutes with every permutation, so it has one other eigenvalue
        w = topology.matrix(size, 0)
        return math.sqrt(max(0.0, (np.trace(w.T @ w) - 1) / (size - 1)))
    product = np.eye(size)
    for step in range(period):
        product = topology.matrix(size, step) @ product
    rest = float(np.linalg.norm(product - 1 / size, 2))
    return 0.0 if rest < 1e-12 else rest ** (1 / period)


def messages_per_step(topology: Topology, size: int) -> float:
    """How many a rank sends in a step: the mean over ranks and steps."""
    steps = topology.period(size) or 1
    sent = [np.count_nonzero(topology.matrix(size, s)) - np.count_nonzero(np.diag(topology.matrix(size, s)))
            for s in range(steps)]  # fmt: skip
    return float(np.mean(sent)) / size


def rounds_for_consensus(topology: Topology, size: int, tolerance: float) -> int:
    """How many steps bring the distance to the mean down to `wanted` of what it was."""
    left = contraction(topology, size)
    return 1 if left <= tolerance else math.ceil(math.log(tolerance) / math.log(left))


# undirected graphs ----------------------------------------------------------------------------------------------------


def metropolis_weights(size: int, edges: Iterable[tuple[int, int]]) -> Matrix:
    """Symmetric weights for any undirected graph, 1 / (1 + the larger degree) (Xiao & Boyd 2004): 1/3 on a ring."""
    there = {frozenset(edge) for edge in edges if edge[0] != edge[1]}
    degrees = np.zeros(size)
    for i, j in there:
        degrees[[i, j]] += 1
    w = np.zeros((size, size))
    for i, j in there:
        w[i, j] = w[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
    return w + np.diag(1 - w.sum(1))


class _StaticTopology:
    """The same matrix at every step, on any number of ranks."""

    def unsupported_reason(self, size: int) -> str:
        return ""

    def period(self, size: int) -> int:
        return 1


@config_class
class Ring(_StaticTopology):
    """Both neighbours on a circle: mixes slowly beyond 16 ranks."""

    name: Literal["ring"] = "ring"

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, [(i, (i + 1) % size) for i in range(size)])


@config_class
class Torus(_StaticTopology):
    """Four neighbours on a grid that is closed both ways, as square as the number of ranks allows."""

    name: Literal["torus"] = "torus"

    def unsupported_reason(self, size: int) -> str:
        return "it needs a number of ranks with divisors" if size > 3 and self._rows(size) == 1 else ""

    def _rows(self, size: int) -> int:
        return max(r for r in range(1, math.isqrt(size) + 1) if size % r == 0)

    def matrix(self, size: int, step: int) -> Matrix:
        rows = self._rows(size)
        cols = size // rows
        cells = itertools.product(range(rows), range(cols))
        ways = [((r, c), other) for r, c in cells for other in (((r + 1) % rows, c), (r, (c + 1) % cols))]
        return metropolis_weights(size, [(a * cols + b, c * cols + d) for (a, b), (c, d) in ways])


@config_class
class Hypercube(_StaticTopology):
    """One neighbour for every bit of a rank's number."""

    name: Literal["hypercube"] = "hypercube"

    def unsupported_reason(self, size: int) -> str:
        return "it needs a power of two" if size & (size - 1) else ""

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, [(i, i ^ (1 << bit)) for i in range(size) for bit in range(_ceil_log2(size))])


@config_class
class Complete(_StaticTopology):
    """Everyone: the mean in one step, at the price of size - 1 messages."""

    name: Literal["complete"] = "complete"

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, itertools.combinations(range(size), 2))


@config_class
class Star(_StaticTopology):
    """Everyone with rank 0."""

    name: Literal["star"] = "star"

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, [(0, i) for i in range(1, size)])


# directed graphs ------------------------------------------------------------------------------------------------------


def _circulant(size: int, weights: dict[int, float]) -> Matrix:
    """Rank i hears rank i - offset: doubly stochastic whatever the weights."""
    w = np.eye(size) * (1 - sum(weights.values()))
    for offset, weight in weights.items():
        w += weight * np.roll(np.eye(size), offset, axis=0)
    return w


@config_class
class Exponential(_StaticTopology):
    """The ranks 1, 2, 4, ... before one's own (Assran et al. 2019)."""

    name: Literal["exponential"] = "exponential"

    def matrix(self, size: int, step: int) -> Matrix:
        hops = _ceil_log2(size)
        return _circulant(size, {1 << hop: 1 / (hops + 1) for hop in range(hops)})


@config_class
class OnePeer(_StaticTopology):
    """One message a step, from the rank 1, then 2, then 4, ... before one's own: the exact mean every log2(size) steps
    where the size is a power of two (Ying et al. 2021)."""

    name: Literal["one-peer"] = "one-peer"

    def period(self, size: int) -> int:
        return max(1, _ceil_log2(size))

    def matrix(self, size: int, step: int) -> Matrix:
        return _circulant(size, {1 << step % self.period(size): 0.5}) if size > 1 else np.eye(1)


# random graphs --------------------------------------------------------------------------------------------------------


class _RandomTopology:
    """Another graph at every step, the same on all ranks."""

    seed: int

    def unsupported_reason(self, size: int) -> str:
        return ""

    def period(self, size: int) -> int:
        return 0

    def _permutation(self, size: int, step: int) -> NDArray[np.int64]:
        return philox_generator(self.seed, "topology", position=step).permutation(size)


@config_class
class Matching(_RandomTopology):
    """Random pairs, a fresh draw each step; of an odd number of ranks one rests."""

    name: Literal["matching"] = "matching"
    seed: Annotated[int, Field(ge=0)] = 0

    def matrix(self, size: int, step: int) -> Matrix:
        order = self._permutation(size, step)
        return metropolis_weights(size, zip(order[0::2].tolist(), order[1::2].tolist()))


@config_class
class RandomRing(_RandomTopology):
    """A ring in random order, a fresh draw each step."""

    name: Literal["random-ring"] = "random-ring"
    seed: Annotated[int, Field(ge=0)] = 0

    def matrix(self, size: int, step: int) -> Matrix:
        order = self._permutation(size, step).tolist()
        return metropolis_weights(size, zip(order, order[1:] + order[:1]))


# a graph of one's own -------------------------------------------------------------------------------------------------


@config_class
class GraphFile(_StaticTopology):
    """The matrix in a text file: a row a line, numbers separated by commas or spaces."""

    path: str
    name: Literal["graph"] = "graph"

    def unsupported_reason(self, size: int) -> str:
        w = _read_matrix(self.path)
        if w.shape != (size, size):
            return f"{self.path} has a matrix for {len(w)}"
        for what, sums in (("row", w.sum(1)), ("column", w.sum(0))):
            bad = np.flatnonzero(abs(sums - 1) > 1e-6)
            if len(bad):
                return f"{what} {bad[0]} of {self.path} adds up to {sums[bad[0]]:.6g}, and all must to 1"
        if (w < 0).any():
            return f"row {np.argwhere(w < 0)[0][0]} of {self.path} has a weight below 0"
        reached = np.linalg.matrix_power((np.eye(size) + w + w.T > 0).astype(float), size)[0] > 0
        if not reached.all():
            component = ", ".join(map(str, np.flatnonzero(reached)))
            return f"{self.path} is not connected: ranks {component} never meet others"
        return ""

    def matrix(self, size: int, step: int) -> Matrix:
        return _read_matrix(self.path)


@lru_cache(maxsize=8)
def _read_matrix(path: str) -> Matrix:
    try:
        text = Path(path).read_text()
        rows = [[float(word) for word in line.replace(",", " ").split()] for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"strategy.topology.path={path} cannot be read: {error}") from error
    if not rows or any(len(row) != len(rows) for row in rows):
        raise UsageError(f"strategy.topology.path={path}: it must have as many numbers in every line as lines")
    return np.array(rows)


@dataclass(frozen=True)
class InducedSubgraph(_StaticTopology):
    """What is left of a graph: its links, with Metropolis weights."""

    edges: tuple[tuple[int, int], ...]
    name: str = "left"

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, self.edges)


AnyTopology = Annotated[
    Ring | Torus | Hypercube | Exponential | OnePeer | Complete | Star | Matching | RandomRing | GraphFile,
    Field(discriminator="name"),
    name_shorthand,
]
BUILTIN_TOPOLOGIES: tuple[Any, ...] = (
    Ring(), Torus(), Hypercube(), Exponential(), OnePeer(), Complete(), Star(), Matching(), RandomRing()
)  # fmt: skip


def _ceil_log2(size: int) -> int:
    """How many powers of two lie below `size`."""
    return (size - 1).bit_length()
