"""Closed formulas for rounds with all-reduces between many equal ranks: what plan/predict/network.py simulates.

A rank sends a segment when it was requested, and two segments are in flight. So a step of a ring takes a round trip, or
as long as the two segments. Buckets are sent as the backward pass fills them; two all-reduces are in flight and share a
port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paragan.comm.compression.compressors import Compressor
from paragan.comm.flat_params import bucket_bytes
from paragan.comm.traffic import ring_all_reduce
from paragan.plan.links import DEFAULT_INTRA_HOST_LINK, Link
from paragan.plan.predict.network import MAX_IN_FLIGHT, MAX_SEGMENT_BYTES
from paragan.plan.predict.rank_clock import codec_s_per_number
from paragan.plan.profile.codec_cost import DEFAULT_CODEC_COST
from paragan.plan.profile.profile import Profile, TurnProfile, interpolate_turns


@dataclass(frozen=True)
class TurnCost:
    """One player's turns in a round of a worker."""

    turn: TurnProfile
    numel: int  # of its flat vector
    moments_numel: int = 0  # of its batch moments
    turns_per_round: int = 1


@dataclass(frozen=True)
class WorkerRound:
    """What a worker computes and sends in a round."""

    images: float  # real images in one turn of D
    d: TurnCost
    g: TurnCost
    codec_cost: Mapping[str, float]  # seconds per number, by operation (plan/profile/codec_cost.py)

    @property
    def compute_s(self) -> float:
        """Seconds of a round without communication."""
        return sum(cost.turns_per_round * cost.turn.total_s for cost in (self.d, self.g))

    @property
    def numel(self) -> int:
        """Numbers of the gradients of a round."""
        return sum(cost.turns_per_round * cost.numel for cost in (self.d, self.g))

    def codec_s_per_number(self, wire: Compressor, passes: int, decodes: int = 2) -> float:
        """Return the seconds per number for passes over memory and, with a lossy wire, one encode and some decodes."""
        passes_s = self.codec_cost["pass"] * passes
        if not wire.lossy:
            return passes_s
        encode_s = codec_s_per_number(self.codec_cost, f"{wire.name}/encode")
        decode_s = codec_s_per_number(self.codec_cost, f"{wire.name}/decode")
        return passes_s + (encode_s + decodes * decode_s)

    @property
    def state_bytes(self) -> int:
        """Bytes that a joining worker fetches: parameters, two optimizer moments each, the average of G."""
        return 4 * (3 * (self.d.numel + self.g.numel) + self.g.numel)


def make_worker_round(run: Any, profile: Profile, ranks: int) -> WorkerRound:
    """Make the round of one worker of a resolved run on `ranks` ranks."""
    images = run.batch / ranks
    g = TurnCost(interpolate_turns(profile.g, images), profile.num_params[0], profile.moments_numel[0])
    d = TurnCost(interpolate_turns(profile.d, images), profile.num_params[1], profile.moments_numel[1], profile.d_steps)
    return WorkerRound(images, d, g, DEFAULT_CODEC_COST | dict(profile.codec_cost))


def ring_steps_s(num_segments: float, segment_bytes: float, link: Link) -> float:
    """Return the seconds of segments, two in flight: a round trip for each two, or what the port takes for all."""
    segment_s = segment_bytes / link.bandwidth
    latency_bound_s = num_segments / MAX_IN_FLIGHT * (2 * link.latency + segment_s) + MAX_IN_FLIGHT * segment_s
    return max(latency_bound_s, num_segments * segment_s)


def ring_all_reduce_s(nbytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a ring all-reduce: two passes round the ring."""
    if num_ranks == 1 or not nbytes:
        return 0.0
    segment_bytes = min(nbytes / (MAX_IN_FLIGHT * num_ranks), MAX_SEGMENT_BYTES)
    num_segments = max(nbytes / segment_bytes, MAX_IN_FLIGHT * num_ranks)
    return 2 * ring_steps_s(num_segments * (num_ranks - 1) / num_ranks, segment_bytes, link)


def compressed_all_reduce_s(nbytes: float, num_ranks: int, link: Link) -> float:
    """Return the seconds of a compressed all-reduce: an all-to-all of shards, then a ring all-gather in halves."""
    if num_ranks == 1 or not nbytes:
        return 0.0
    all_to_all_s = 2 * link.latency + nbytes * (num_ranks - 1) / num_ranks / link.bandwidth
    return all_to_all_s + ring_steps_s(MAX_IN_FLIGHT * (num_ranks - 1), nbytes / num_ranks / MAX_IN_FLIGHT, link)


@dataclass(frozen=True)
class AllReduceModel:
    """How gradients are summed over all ranks.

    With `group_size` above 1 it is hierarchical: each group of ranks reduces its gradients over `intra_host` links,
    then each part is reduced between the groups, and gathered again.
    """

    wire: Compressor
    codec_s_per_number: float = 0.0  # computing of the exchange
    group_size: int = 1
    intra_host: Link = DEFAULT_INTRA_HOST_LINK

    def all_reduce_s(self, numel: float, ranks: int, link: Link) -> float:
        """Return the seconds of an all-reduce of `numel` numbers."""
        if ranks <= self.group_size:
            return ring_all_reduce_s(4 * numel, ranks, self.intra_host)
        inner_s = ring_all_reduce_s(4 * numel, self.group_size, self.intra_host)
        outer = compressed_all_reduce_s if self.wire.lossy else ring_all_reduce_s
        outer_bytes = self.wire.nbytes(round(numel)) / self.group_size
        return inner_s + outer(outer_bytes, -(-ranks // self.group_size), link)

    def sent_bytes(self, numel: float, ranks: int) -> int:
        """Return the bytes that a rank sends in an all-reduce of `numel` numbers."""
        inner = ring_all_reduce(round(4 * numel), self.group_size)
        num_groups = -(-ranks // self.group_size)
        between = ring_all_reduce(self.wire.nbytes(round(numel)) // self.group_size, num_groups)
        return (inner + between).sent_bytes  # a compressed sum has an all-to-all and an all-gather: as many bytes

    def turn_s(self, cost: TurnCost, ranks: int, link: Link, slowdown: float = 1.0) -> float:
        """Return the seconds of a turn whose gradients are summed during the backward pass.

        Args:
            cost: of the turn.
            ranks: that sum.
            link: between them.
            slowdown: factor on the computing time.
        """
        turn = cost.turn
        buckets = _bucket_times(cost, self.wire)
        shared = Link(link.bandwidth / min(MAX_IN_FLIGHT, len(buckets)), link.latency)
        sums: list[tuple[float, float]] = []
        if cost.moments_numel:
            sums.append((slowdown * turn.grads_ready_s[0], self.all_reduce_s(cost.moments_numel, ranks, shared)))
        for ready_s, numel in buckets:
            sums.append((slowdown * ready_s, self.all_reduce_s(numel, ranks, shared)))
        seconds = max(slowdown * turn.backward_s, _pipelined_end_s(sums))
        seconds += slowdown * (turn.total_s - turn.backward_s)
        if ranks > 1:
            seconds += cost.numel * self.codec_s_per_number
        return seconds

    def exposed_s(self, cost: TurnCost, ranks: int, link: Link) -> float:
        """Return the seconds of an all-reduce that no computing hides: one bucket after the other."""
        sums_s = sum(self.all_reduce_s(numel, ranks, link) for _, numel in _bucket_times(cost, self.wire))
        return sums_s + cost.numel * self.codec_s_per_number


def _bucket_times(cost: TurnCost, wire: Compressor) -> list[tuple[float, float]]:
    """Return for each bucket when it is ready, and its numbers."""
    count = max(1, round(4 * cost.numel / bucket_bytes(wire)))
    ready = cost.turn.grads_ready_s
    parts = [min(len(ready), -(-len(ready) * (i + 1) // count)) - 1 for i in range(count)]
    return [(ready[part], cost.numel / count) for part in parts]


def _pipelined_end_s(operations: Sequence[tuple[float, float]]) -> float:
    """Return the end of the last of some operations (earliest start, seconds), MAX_IN_FLIGHT at a time."""
    ends = list[float]()
    for i, (ready_s, seconds) in enumerate(operations):
        start_s = max(ready_s, ends[i - MAX_IN_FLIGHT]) if i >= MAX_IN_FLIGHT else ready_s
        ends.append(start_s + seconds)
    return max(ends, default=0.0)
