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
from paragan.plan.links import DEFAULT_INTRA_HOST_LINK, Link
from paragan.plan.predict.network import MAX_IN_FLIGHT, MAX_SEGMENT_BYTES
from paragan.plan.predict.simulator import codec_s_per_number
from paragan.plan.profile.codec_cost import DEFAULT_CODEC_COST
from paragan.plan.profile.profile import Profile, TurnProfile, interpolate_turns


@dataclass(frozen=True)
class TurnCost:
    """One player's turn of a worker. numbers: of its vector;  moments: of batch moments;  steps: turns in a round"""

    turn: TurnProfile
    numel: int
    moments_numel: int = 0
    turns_per_round: int = 1


@dataclass(frozen=True)
class WorkerRound:
    """A worker's part of a round. images: reals in one turn of D;  costs: seconds for a number (worker/handling.py)"""

    images: float
    d: TurnCost
    g: TurnCost
    codec_cost: Mapping[str, float]

    @property
    def compute_s(self) -> float:
        """Seconds of a round without anybody else."""
        return sum(half.turns_per_round * half.turn.total_s for half in (self.d, self.g))

    @property
    def numel(self) -> int:
        """That travel in a round, once each."""
        return sum(half.turns_per_round * half.numel for half in (self.d, self.g))

    def codec_s_per_number(self, wire: Compressor, passes: int, decodes: int = 2) -> float:
        """For a number that is packed, unpacked so many times, and passed over."""
        each = self.codec_cost["pass"] * passes
        return (
            each
            + (
                codec_s_per_number(self.codec_cost, f"{wire.name}/encode")
                + decodes * codec_s_per_number(self.codec_cost, f"{wire.name}/decode")
            )
            * wire.lossy
        )

    @property
    def state_bytes(self) -> int:
        """What a worker fetches that joins: vectors, two moments of each, the average of G."""
        return 4 * (3 * (self.d.numel + self.g.numel) + self.g.numel)


def make_worker_round(run: Any, profile: Profile, ranks: int) -> WorkerRound:
    """A resolved run on so many ranks."""
    images = run.batch / ranks
    g = TurnCost(interpolate_turns(profile.g, images), profile.num_params[0], profile.moments_numel[0])
    d = TurnCost(interpolate_turns(profile.d, images), profile.num_params[1], profile.moments_numel[1], profile.d_steps)
    return WorkerRound(images, d, g, DEFAULT_CODEC_COST | dict(profile.codec_cost))


def ring_steps_s(num_segments: float, segment_bytes: float, link: Link) -> float:
    """Seconds of so many segments, two under way: there and back for each two, or as long as a port takes for all."""
    takes = segment_bytes / link.bandwidth
    return max(num_segments / MAX_IN_FLIGHT * (2 * link.latency + takes) + MAX_IN_FLIGHT * takes, num_segments * takes)


def ring_all_reduce_s(nbytes: float, num_ranks: int, link: Link) -> float:
    """A sum goes round twice, in pieces of the n-th part."""
    if num_ranks == 1 or not nbytes:
        return 0.0
    segment = min(nbytes / (MAX_IN_FLIGHT * num_ranks), MAX_SEGMENT_BYTES)
    return 2 * ring_steps_s(
        max(nbytes / segment, MAX_IN_FLIGHT * num_ranks) * (num_ranks - 1) / num_ranks, segment, link
    )


def compressed_all_reduce_s(nbytes: float, num_ranks: int, link: Link) -> float:
    """Every rank gets its shard from all at once, and passes sums round in halves."""
    if num_ranks == 1 or not nbytes:
        return 0.0
    scatter = 2 * link.latency + nbytes * (num_ranks - 1) / num_ranks / link.bandwidth
    return scatter + ring_steps_s(MAX_IN_FLIGHT * (num_ranks - 1), nbytes / num_ranks / MAX_IN_FLIGHT, link)


@dataclass(frozen=True)
class AllReduceModel:
    """How a vector becomes the sum of all. handling: seconds for a number;  groups: so many ranks scatter their sum
    over `within`, then each part goes round among those of all groups that have it, and back (rings of rings)"""

    wire: Compressor
    codec_s_per_number: float = 0.0
    group_size: int = 1
    intra_host: Link = DEFAULT_INTRA_HOST_LINK

    def all_reduce_s(self, numel: float, ranks: int, link: Link) -> float:
        nbytes = self.wire.nbytes(round(numel))
        outer = compressed_all_reduce_s if self.wire.lossy else ring_all_reduce_s
        if ranks <= self.group_size:
            return ring_all_reduce_s(4 * numel, ranks, self.intra_host)
        inner = ring_all_reduce_s(4 * numel, self.group_size, self.intra_host)
        return inner + outer(nbytes / self.group_size, -(-ranks // self.group_size), link)

    def sent_bytes(self, numel: float, ranks: int) -> float:
        """That a rank sends."""
        nbytes, outside = self.wire.nbytes(round(numel)), -(-ranks // self.group_size)
        within = 2 * 4 * numel * (self.group_size - 1) / self.group_size
        return within + 2 * nbytes / self.group_size * (outside - 1) / outside

    def turn_s(self, cost: TurnCost, ranks: int, link: Link, slowdown: float = 1.0) -> float:
        """A turn whose gradient is summed under backward. factor: on computing"""
        turn, cut = cost.turn, _bucket_times(cost, self.wire)
        shared = Link(link.bandwidth / min(MAX_IN_FLIGHT, len(cut)), link.latency)
        sums = (
            [(slowdown * turn.grads_ready_s[0], self.all_reduce_s(cost.moments_numel, ranks, shared))]
            if cost.moments_numel
            else []
        )
        sums += [(slowdown * at, self.all_reduce_s(numbers, ranks, shared)) for at, numbers in cut]
        over = max(slowdown * turn.backward_s, _pipelined_end_s(sums))
        return over + slowdown * (turn.total_s - turn.backward_s) + cost.numel * self.codec_s_per_number * (ranks > 1)

    def exposed_s(self, cost: TurnCost, ranks: int, link: Link) -> float:
        """A sum that nothing hides: one bucket after the other."""
        sums = sum(self.all_reduce_s(numbers, ranks, link) for _, numbers in _bucket_times(cost, self.wire))
        return sums + cost.numel * self.codec_s_per_number


def _bucket_times(cost: TurnCost, wire: Compressor) -> list[tuple[float, float]]:
    """When each leaves, and its numbers."""
    count = max(1, round(4 * cost.numel / bucket_bytes(wire)))
    ready = cost.turn.grads_ready_s
    places = [min(len(ready), -(-len(ready) * (i + 1) // count)) - 1 for i in range(count)]
    return [(ready[place], cost.numel / count) for place in places]


def _pipelined_end_s(sums: Sequence[tuple[float, float]]) -> float:
    """When the last is over: each begins when its bucket is filled, and only so many are under way."""
    ends = list[float]()
    for i, (at, seconds) in enumerate(sums):
        begins = max(at, ends[i - MAX_IN_FLIGHT]) if i >= MAX_IN_FLIGHT else at
        ends.append(begins + seconds)
    return max(ends, default=0.0)
