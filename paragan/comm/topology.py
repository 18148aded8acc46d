"""Topologies: which ranks average with each other under gossip, and with what weights. Pure functions of (size, step).

x_i <- sum_j W_ij x_j with a doubly stochastic W keeps the mean over ranks and moves every rank towards it. The part of
the distance to the mean that remains after a step is `contraction`: the second singular value of W. If W changes from
step to step it is the geometric mean over a period; if W is random, the root of the second eigenvalue of E[W'W] (Boyd
et al. 2006).
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
from paragan.core.philox import philox_generator
from paragan.core.schema import config_class, name_shorthand

Matrix = NDArray[np.float64]


class Topology(Protocol):
    """A mixing matrix for every step."""

    @property
    def name(self) -> str:
        """What `strategy.topology` calls it."""
        ...

    def unsupported_reason(self, size: int) -> str:
        """Return why it cannot be used on `size` ranks; empty if it can."""
        ...

    def period(self, size: int) -> int:
        """Return after how many steps the matrices repeat; 0: never, they are random."""
        ...

    def matrix(self, size: int, step: int) -> Matrix:
        """Return W [size, size], doubly stochastic. Row i has the weights of what rank i receives."""
        ...


def check_topology(topology: Topology, size: int) -> None:
    """Raise UsageError if a topology cannot be used on `size` ranks; it names those that can."""
    reason = topology.unsupported_reason(size)
    if reason:
        usable = ", ".join(t.name for t in BUILTIN_TOPOLOGIES if not t.unsupported_reason(size))
        raise UsageError(f"strategy.topology={topology.name} on {size} ranks: {reason}. Use {usable}")


def restrict_to(topology: Topology, original_ranks: Sequence[int], initial_size: int) -> Topology:
    """Return the topology for the ranks that remain.

    It is the same one if it can be used on so many ranks. Otherwise it is what remains of its links, or a ring if those
    do not connect all ranks.

    Args:
        topology: the one that the run was started with.
        original_ranks: the numbers with which the remaining ranks were started.
        initial_size: how many ranks there were.
    """
    size = len(original_ranks)
    if size == initial_size or not topology.unsupported_reason(size):
        check_topology(topology, size)
        return topology
    matrices = [topology.matrix(initial_size, step) for step in range(topology.period(initial_size))]
    linked = np.add.reduce(matrices)[np.ix_(original_ranks, original_ranks)]
    subgraph = InducedSubgraph(tuple((i, j) for i in range(size) for j in range(i) if linked[i, j] or linked[j, i]))
    return subgraph if size == 1 or contraction(subgraph, size) < 1 - 1e-9 else Ring()


def is_static(topology: Topology, size: int) -> bool:
    """Return whether the matrix is the same at every step, and symmetric."""
    if topology.period(size) != 1:
        return False
    if hasattr(topology, "senders"):  # for many ranks, the matrix would not fit into memory
        senders = np.array(topology.senders(size, 0), np.int64).reshape(-1, size)  # pyright: ignore
        edges = np.arange(size) * size + senders
        return np.array_equal(np.sort(edges, axis=None), np.sort(senders * size + np.arange(size), axis=None))
    return np.allclose(topology.matrix(size, 0), topology.matrix(size, 0).T)


@dataclass(frozen=True)
class Neighbors:
    """One rank's part of a mixing matrix.

    send_to     : the ranks that it sends to
    recv_from   : the weight of each rank that it receives from
    self_weight : of its own parameters
    """

    send_to: tuple[int, ...]
    recv_from: dict[int, float]
    self_weight: float


@lru_cache(maxsize=4096)
def neighbors(topology: Topology, size: int, rank: int, step: int) -> Neighbors:
    """Return a rank's part of W(step)."""
    period = topology.period(size)
    w = topology.matrix(size, step % period if period else step)
    others = [j for j in range(size) if j != rank]
    return Neighbors(
        send_to=tuple(j for j in others if w[j, rank]),
        recv_from={j: float(w[rank, j]) for j in others if w[rank, j]},
        self_weight=float(w[rank, rank]),
    )


def contraction(topology: Topology, size: int) -> float:
    """Return the part of the distance to the mean that remains after a step, at worst.

    For random topologies it is the root mean square. 0: a step reaches the mean; 1: the ranks are not connected.
    """
    if size == 1:
        return 0.0
    period = topology.period(size)
    if not period:  # random permutations: E[W'W] commutes with all of them, so it has only one eigenvalue beside 1
        w = topology.matrix(size, 0)
        return math.sqrt(max(0.0, (np.trace(w.T @ w) - 1) / (size - 1)))
    product = np.eye(size)
    for step in range(period):
        product = topology.matrix(size, step) @ product
    remainder = float(np.linalg.norm(product - 1 / size, 2))
    return 0.0 if remainder < 1e-12 else remainder ** (1 / period)


def contraction_by_spectrum(topology: Any, size: int) -> float:
    """Return `contraction` for any number of ranks, without a matrix.

    Raises:
        UsageError: the topology has no `spectrum`, or does not support this number of ranks.
    """
    if not hasattr(topology, "spectrum"):
        names = ", ".join(t.name for t in BUILTIN_TOPOLOGIES if hasattr(t, "spectrum"))
        raise UsageError(f"strategy.topology={topology.name}: no formula for {size} ranks. Use {names}")
    reason = topology.unsupported_reason(size)
    if reason:
        raise UsageError(f"strategy.topology={topology.name} on {size} ranks: {reason}")
    period = topology.period(size) or 1
    product = np.ones(1)
    for step in range(period):
        product = product * np.abs(topology.spectrum(size, step))
    remainder = float(product.max()) if size > 1 else 0.0
    return 0.0 if remainder < 1e-12 else remainder ** (1 / period)


def messages_per_step(topology: Topology, size: int) -> float:
    """Return how many messages a rank sends in a step: the mean over ranks and steps."""
    matrices = [topology.matrix(size, step) for step in range(topology.period(size) or 1)]
    messages = [np.count_nonzero(w) - np.count_nonzero(np.diag(w)) for w in matrices]
    return float(np.mean(messages)) / size


def rounds_for_consensus(topology: Topology, size: int, tolerance: float) -> int:
    """Return how many steps reduce the distance to the mean to `tolerance` of what it was."""
    factor = contraction(topology, size)
    return 1 if factor <= tolerance else math.ceil(math.log(tolerance) / math.log(factor))


# undirected graphs ----------------------------------------------------------------------------------------------------


def metropolis_weights(size: int, edges: Iterable[tuple[int, int]]) -> Matrix:
    """Return weights 1 / (1 + the larger degree) for an undirected graph (Xiao & Boyd 2004); 1/3 on a ring.

    Args:
        size: the number of ranks.
        edges: pairs of ranks, in any order; repetitions and self-loops are ignored.
    """
    unique_edges = {frozenset(edge) for edge in edges if edge[0] != edge[1]}
    degrees = np.zeros(size)
    for i, j in unique_edges:
        degrees[[i, j]] += 1
    w = np.zeros((size, size))
    for i, j in unique_edges:
        w[i, j] = w[j, i] = 1 / (1 + max(degrees[i], degrees[j]))
    return w + np.diag(1 - w.sum(1))


class RegularTopology(Topology, Protocol):
    """Every rank receives equally many messages in a step, of equal weight: W is known without being built."""

    def senders(self, size: int, step: int) -> list[NDArray[np.int64]]:
        """Return the rank that each rank receives from (itself: none), one array [size] for each message."""
        ...

    def spectrum(self, size: int, step: int) -> NDArray[Any]:
        """Return the eigenvalues of W beside 1, in an order that is the same at every step.

        For random graphs, the root mean square of what remains.
        """
        ...


class _StaticTopology:
    """Has the same matrix at every step, on any number of ranks."""

    def unsupported_reason(self, size: int) -> str:
        return ""

    def period(self, size: int) -> int:
        return 1


class _Circulant(_StaticTopology):
    """Rank i receives from rank i - offset, for some offsets."""

    def offsets(self, size: int, step: int) -> list[int]:
        raise NotImplementedError

    def senders(self, size: int, step: int) -> list[NDArray[np.int64]]:
        return [(np.arange(size) - offset) % size for offset in self.offsets(size, step)]

    def spectrum(self, size: int, step: int) -> NDArray[Any]:
        offsets = self.offsets(size, step)
        column = np.zeros(size)
        column[[0, *(offset % size for offset in offsets)]] = 1 / (1 + len(offsets))
        return np.fft.fft(column)[1:]


@config_class
class Ring(_Circulant):
    """Both neighbors on a circle: averages slowly beyond 16 ranks."""

    name: Literal["ring"] = "ring"

    def offsets(self, size: int, step: int) -> list[int]:
        return sorted({1 % size, -1 % size} - {0})

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, [(i, (i + 1) % size) for i in range(size)])


@config_class
class Torus(_StaticTopology):
    """Four neighbors on a grid that wraps around, as square as the number of ranks allows."""

    name: Literal["torus"] = "torus"

    def unsupported_reason(self, size: int) -> str:
        return "it needs a number of ranks that is not prime" if size > 3 and self._rows(size) == 1 else ""

    def _rows(self, size: int) -> int:
        return max(r for r in range(1, math.isqrt(size) + 1) if size % r == 0)

    def matrix(self, size: int, step: int) -> Matrix:
        rows = self._rows(size)
        cols = size // rows
        edges: list[tuple[int, int]] = []
        for row, col in itertools.product(range(rows), range(cols)):
            rank = row * cols + col
            edges.append((rank, (row + 1) % rows * cols + col))
            edges.append((rank, row * cols + (col + 1) % cols))
        return metropolis_weights(size, edges)


@config_class
class Hypercube(_StaticTopology):
    """Connect each rank to those whose number differs in one bit (a hypercube); for powers of two."""

    name: Literal["hypercube"] = "hypercube"

    def unsupported_reason(self, size: int) -> str:
        return "it needs a number of ranks that is a power of two" if size & (size - 1) else ""

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, [(i, i ^ (1 << bit)) for i in range(size) for bit in range(_ceil_log2(size))])

    def senders(self, size: int, step: int) -> list[NDArray[np.int64]]:
        return [np.arange(size) ^ (1 << bit) for bit in range(_ceil_log2(size))]

    def spectrum(self, size: int, step: int) -> NDArray[Any]:
        hops = _ceil_log2(size)
        return 1 - 2 * np.arange(1, hops + 1) / (hops + 1)  # by the number of bits in which an eigenvector alternates


@config_class
class Complete(_StaticTopology):
    """All ranks: reaches the mean in one step, for size - 1 messages."""

    name: Literal["complete"] = "complete"

    def spectrum(self, size: int, step: int) -> NDArray[Any]:
        return np.zeros(1)

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, itertools.combinations(range(size), 2))


@config_class
class Star(_StaticTopology):
    """Every rank with rank 0."""

    name: Literal["star"] = "star"

    def matrix(self, size: int, step: int) -> Matrix:
        return metropolis_weights(size, [(0, i) for i in range(1, size)])

    def spectrum(self, size: int, step: int) -> NDArray[Any]:
        return np.array([1 - 1 / size if size > 2 else 0.0])


# directed graphs ------------------------------------------------------------------------------------------------------


def _circulant(size: int, weights: dict[int, float]) -> Matrix:
    """Return the matrix by which rank i receives from rank i - offset: doubly stochastic for any weights."""
    w = np.eye(size) * (1 - sum(weights.values()))
    for offset, weight in weights.items():
        w += weight * np.roll(np.eye(size), offset, axis=0)
    return w


@config_class
class Exponential(_Circulant):
    """Receives from the ranks 1, 2, 4, ... before its own (Assran et al. 2019)."""

    name: Literal["exponential"] = "exponential"

    def offsets(self, size: int, step: int) -> list[int]:
        return [1 << hop for hop in range(_ceil_log2(size))]

    def matrix(self, size: int, step: int) -> Matrix:
        hops = _ceil_log2(size)
        return _circulant(size, {1 << hop: 1 / (hops + 1) for hop in range(hops)})


@config_class
class OnePeer(_Circulant):
    """One message a step, from the rank 1, then 2, then 4, ... before its own (Ying et al. 2021).

    Reaches the exact mean every log2(size) steps if the size is a power of two.
    """

    name: Literal["one-peer"] = "one-peer"

    def offsets(self, size: int, step: int) -> list[int]:
        return [1 << step % self.period(size)] if size > 1 else []

    def period(self, size: int) -> int:
        return max(1, _ceil_log2(size))

    def matrix(self, size: int, step: int) -> Matrix:
        return _circulant(size, {1 << step % self.period(size): 0.5}) if size > 1 else np.eye(1)


# random graphs --------------------------------------------------------------------------------------------------------


class _RandomTopology:
    """Has another random graph at every step, the same on all ranks."""

    seed: int

    def unsupported_reason(self, size: int) -> str:
        return ""

    def period(self, size: int) -> int:
        return 0

    def _permutation(self, size: int, step: int) -> NDArray[np.int64]:
        return philox_generator(self.seed, "topology", position=step).permutation(size)

    def senders(self, size: int, step: int) -> list[NDArray[np.int64]]:
        raise NotImplementedError

    def spectrum(self, size: int, step: int) -> NDArray[Any]:
        senders = self.senders(size, step)
        weight = 1 / (1 + len(senders))
        own_weight = weight * (1 + sum((sender == np.arange(size)).astype(float) for sender in senders))
        received = weight**2 * sum((sender != np.arange(size)).sum() for sender in senders)
        squares = float(np.sum(own_weight**2) + received)
        return np.array([math.sqrt(max(0.0, (squares - 1) / max(1, size - 1)))])


@config_class
class Matching(_RandomTopology):
    """Random pairs, new ones at each step; one of an odd number of ranks has no partner.

    seed : of the random graphs
    """

    name: Literal["matching"] = "matching"
    seed: Annotated[int, Field(ge=0)] = 0

    def matrix(self, size: int, step: int) -> Matrix:
        order = self._permutation(size, step)
        return metropolis_weights(size, zip(order[0::2].tolist(), order[1::2].tolist()))

    def senders(self, size: int, step: int) -> list[NDArray[np.int64]]:
        order = self._permutation(size, step)
        partners = np.arange(size)
        last = size - size % 2
        partners[order[0:last:2]] = order[1:last:2]
        partners[order[1:last:2]] = order[0:last:2]
        return [partners]


@config_class
class RandomRing(_RandomTopology):
    """A ring in random order, a new one at each step.

    seed : of the random graphs
    """

    name: Literal["random-ring"] = "random-ring"
    seed: Annotated[int, Field(ge=0)] = 0

    def matrix(self, size: int, step: int) -> Matrix:
        order = self._permutation(size, step).tolist()
        return metropolis_weights(size, zip(order, order[1:] + order[:1]))

    def senders(self, size: int, step: int) -> list[NDArray[np.int64]]:
        order = self._permutation(size, step)
        senders = [np.empty(size, np.int64) for _ in range(min(2, size - 1))]
        for sender, shift in zip(senders, (1, -1)):
            sender[order] = np.roll(order, shift)
        return senders


# other graphs --------------------------------------------------------------------------------------------------------


@config_class
class GraphFile(_StaticTopology):
    """The matrix in a text file: one row a line, numbers separated by commas or spaces.

    path : of the text file
    """

    path: str
    name: Literal["graph"] = "graph"

    def unsupported_reason(self, size: int) -> str:
        w = _read_matrix(self.path)
        if w.shape != (size, size):
            return f"the matrix in {self.path} is for {len(w)} ranks"
        for axis, sums in (("row", w.sum(1)), ("column", w.sum(0))):
            bad = np.flatnonzero(abs(sums - 1) > 1e-6)
            if len(bad):
                return f"{axis} {bad[0]} of {self.path} adds up to {sums[bad[0]]:.6g}; it must be 1"
        if (w < 0).any():
            return f"row {np.argwhere(w < 0)[0][0]} of {self.path} has a negative weight"
        reached = np.linalg.matrix_power((np.eye(size) + w + w.T > 0).astype(float), size)[0] > 0
        if not reached.all():
            component = ", ".join(map(str, np.flatnonzero(reached)))
            return f"the graph in {self.path} is not connected: ranks {component} have no link to the others"
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
        raise UsageError(f"strategy.topology.path={path}: every line must have as many numbers as there are lines")
    return np.array(rows)


@dataclass(frozen=True)
class InducedSubgraph(_StaticTopology):
    """The links of a graph that remain between some of its ranks, with Metropolis weights."""

    edges: tuple[tuple[int, int], ...]
    name: str = "induced-subgraph"

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
    """Return how many powers of two are less than `size`."""
    return (size - 1).bit_length()
