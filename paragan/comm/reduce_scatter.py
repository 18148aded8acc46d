"""The exchange of a sharded optimizer: every rank gets the sum of the gradient for its own part of a bucket only.

The ranks send their numbers to the owner, which adds them in the order in which the ring all-reduce of gloo does. A
sharded and an unsharded run therefore agree in every bit (on NCCL, whose order is not documented, up to rounding).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paragan.comm.bucket import GRAD_READY, Bucket, ExchangeEvent
from paragan.comm.flat_shards import MAX_IN_FLIGHT, local_part, padded, part_numel
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Traffic, all_to_all, ring_all_gather

GLOO_SEGMENT_BYTES = 1 << 20  # kMaxSegmentSize of gloo/allreduce.h


def ring_block_numel(numel: int, itemsize: int, ranks: int) -> int:
    """Return the size of the blocks into which gloo's ring all-reduce divides a vector, one for each rank.

    A block is sent in at least two segments, all segments of all blocks have the same size (gloo/allreduce.cc, `ring`).
    """
    max_segment = max(1, GLOO_SEGMENT_BYTES // itemsize)
    segments_of_rank = max(2, -(-numel // (max_segment * ranks)))
    return segments_of_rank * -(-numel // (segments_of_rank * ranks))


def sum_in_ring_order(rows: Tensor, total: Tensor, start: int, block: int) -> None:
    """Sum rows [ranks, k] into total [n], n <= k, as gloo's ring does: block c from rank c - 1 downwards to rank c.

    Args:
        rows: the numbers of every rank.
        start: the position of `total` in the vector that is divided into blocks.
        block: the size of the blocks.
    """
    ranks = len(rows)
    first = 0
    while first < len(total):
        number, offset = divmod(start + first, block)
        end = min(len(total), first + block - offset)
        terms = [rows[(number - i) % ranks, first:end] for i in range(1, ranks + 1)]
        torch.add(terms[0], terms[1], out=total[first:end])
        for term in terms[2:]:
            total[first:end].add_(term)
        first = end


class _PartSum:
    """The sum of this rank's part of a bucket, in flight; when it is complete, the rest of the gradient is 0."""

    def __init__(self, bucket: Bucket, group: Group):
        grads = bucket.grads
        size = part_numel(len(grads), grads.itemsize, group.size)
        self._bucket = bucket
        self._group = group
        self._sent = padded(grads, size * group.size).view(group.size, size)
        self._received: Tensor | None = torch.empty_like(self._sent)
        self._work: Work = group.all_to_all(self._sent, self._received)

    def wait(self) -> None:
        """Complete it, unless it is complete."""
        if self._received is None:
            return
        self._work.wait()
        grads = self._bucket.grads
        part = local_part(self._bucket, self._group)
        block = ring_block_numel(len(grads), grads.itemsize, self._group.size)
        grads.zero_()
        sum_in_ring_order(self._received, grads[part], part.start, block)
        self._received = None
        del self._work, self._sent


@dataclass(frozen=True)
class ReduceScatter:
    """Sum the shares of the group: every rank gets its own part of the gradient (`FlatShards`), and 0 elsewhere.

    At most MAX_IN_FLIGHT buckets have memory for what they receive: a further one waits for the oldest.
    """

    group: Group
    _in_flight: deque[_PartSum] = field(default_factory=deque[_PartSum], compare=False)

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield GRAD_READY
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().wait()
        part_sum = _PartSum(bucket, self.group)
        self._in_flight.append(part_sum)
        try:
            yield part_sum
        finally:  # also if the step is aborted
            if part_sum in self._in_flight:
                self._in_flight.remove(part_sum)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return what is sent, with the parameters that are gathered after the step (`FlatShards.gather_params`)."""
        size = part_numel(n, itemsize, self.group.size)
        ranks = self.group.size
        return all_to_all(itemsize * size * ranks, ranks) + ring_all_gather(itemsize * size, ranks)
