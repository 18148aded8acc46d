"""A round in which many ranks sum, in closed form: collectives as plan/foreseen/network.py plays them, between equals.

A rank sends a segment when it has been asked for, and asks when it has room: a step of a ring takes there and back, or
as long as two segments take, which are under way. Buckets leave as backward fills them; two sums are under way, and
share a port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paragan.comm.compression.compressors import Compressor
from paragan.comm.flat_params import bucket_bytes
from paragan.plan.links import WITHIN, Link
from paragan.plan.predict.network import SEGMENT, UNDER_WAY
from paragan.plan.predict.simulator import cost
from paragan.plan.profile.codec_cost import USUAL
from paragan.plan.profile.profile import Profile, Turn, between


@dataclass(frozen=True)
class Half:
    """One player's turn of a worker. numbers: of its vector;  moments: of batch moments;  steps: turns in a round"""

    turn: Turn
    numbers: int
    moments: int = 0
    steps: int = 1


@dataclass(frozen=True)
class Job:
    """A worker's part of a round. images: reals in one turn of D;  costs: seconds for a number (worker/handling.py)"""

    images: float
    d: Half
    g: Half
    costs: Mapping[str, float]

    @property
    def alone_s(self) -> float:
        """Seconds of a round without anybody else."""
        return sum(half.steps * half.turn.whole for half in (self.d, self.g))

    @property
    def numbers(self) -> int:
        """That travel in a round, once each."""
        return sum(half.steps * half.numbers for half in (self.d, self.g))

    def handling_s(self, wire: Compressor, passes: int, decoded: int = 2) -> float:
        """For a number that is packed, unpacked so many times, and passed over."""
        each = self.costs["pass"] * passes
        return (
            each
            + (cost(self.costs, f"{wire.name}/encode") + decoded * cost(self.costs, f"{wire.name}/decode")) * wire.lossy
        )

    @property
    def state_bytes(self) -> int:
        """What a worker fetches that joins: vectors, two moments of each, the average of G."""
        return 4 * (3 * (self.d.numbers + self.g.numbers) + self.g.numbers)


def job_of(run: Any, profile: Profile, ranks: int) -> Job:
    """A resolved run on so many ranks."""
    images = run.batch / ranks
    g = Half(between(profile.g, images), profile.params[0], profile.moments[0])
    d = Half(between(profile.d, images), profile.params[1], profile.moments[1], profile.d_steps)
    return Job(images, d, g, USUAL | dict(profile.handling))


def steps_s(count: float, segment: float, link: Link) -> float:
    """Seconds of so many segments, two under way: there and back for each two, or as long as a port takes for all."""
    takes = segment / link.bandwidth
    return max(count / UNDER_WAY * (2 * link.latency + takes) + UNDER_WAY * takes, count * takes)


def ring_sum_s(nbytes: float, size: int, link: Link) -> float:
    """A sum goes round twice, in pieces of the n-th part."""
    if size == 1 or not nbytes:
        return 0.0
    segment = min(nbytes / (UNDER_WAY * size), SEGMENT)
    return 2 * steps_s(max(nbytes / segment, UNDER_WAY * size) * (size - 1) / size, segment, link)


def compressed_sum_s(nbytes: float, size: int, link: Link) -> float:
    """Every rank gets its shard from all at once, and passes sums round in halves."""
    if size == 1 or not nbytes:
        return 0.0
    scatter = 2 * link.latency + nbytes * (size - 1) / size / link.bandwidth
    return scatter + steps_s(UNDER_WAY * (size - 1), nbytes / size / UNDER_WAY, link)


@dataclass(frozen=True)
class Summing:
    """How a vector becomes the sum of all. handling: seconds for a number;  groups: so many ranks scatter their sum
    over `within`, then each part goes round among those of all groups that have it, and back (rings of rings)"""

    wire: Compressor
    handling: float = 0.0
    groups: int = 1
    within: Link = WITHIN

    def seconds(self, numbers: float, ranks: int, link: Link) -> float:
        nbytes = self.wire.nbytes(round(numbers))
        outer = compressed_sum_s if self.wire.lossy else ring_sum_s
        if ranks <= self.groups:
            return ring_sum_s(4 * numbers, ranks, self.within)
        inner = ring_sum_s(4 * numbers, self.groups, self.within)
        return inner + outer(nbytes / self.groups, -(-ranks // self.groups), link)

    def sent_bytes(self, numbers: float, ranks: int) -> float:
        """That a rank sends."""
        nbytes, outside = self.wire.nbytes(round(numbers)), -(-ranks // self.groups)
        within = 2 * 4 * numbers * (self.groups - 1) / self.groups
        return within + 2 * nbytes / self.groups * (outside - 1) / outside

    def turn_s(self, half: Half, ranks: int, link: Link, factor: float = 1.0) -> float:
        """A turn whose gradient is summed under backward. factor: on computing"""
        turn, cut = half.turn, _buckets(half, self.wire)
        shared = Link(link.bandwidth / min(UNDER_WAY, len(cut)), link.latency)
        sums = [(factor * turn.ready[0], self.seconds(half.moments, ranks, shared))] if half.moments else []
        sums += [(factor * at, self.seconds(numbers, ranks, shared)) for at, numbers in cut]
        over = max(factor * turn.backward, _pipelined(sums))
        return over + factor * (turn.whole - turn.backward) + half.numbers * self.handling * (ranks > 1)

    def apart_s(self, half: Half, ranks: int, link: Link) -> float:
        """A sum that nothing hides: one bucket after the other."""
        sums = sum(self.seconds(numbers, ranks, link) for _, numbers in _buckets(half, self.wire))
        return sums + half.numbers * self.handling


def _buckets(half: Half, wire: Compressor) -> list[tuple[float, float]]:
    """When each leaves, and its numbers."""
    count = max(1, round(4 * half.numbers / bucket_bytes(wire)))
    ready = half.turn.ready
    places = [min(len(ready), -(-len(ready) * (i + 1) // count)) - 1 for i in range(count)]
    return [(ready[place], half.numbers / count) for place in places]


def _pipelined(sums: Sequence[tuple[float, float]]) -> float:
    """When the last is over: each begins when its bucket is filled, and only so many are under way."""
    ends = list[float]()
    for i, (at, seconds) in enumerate(sums):
        begins = max(at, ends[i - UNDER_WAY]) if i >= UNDER_WAY else at
        ends.append(begins + seconds)
    return max(ends, default=0.0)
