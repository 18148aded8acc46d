"""The flat vectors of a player divided among ranks: each owns one part of every bucket, for a sharded optimizer.

All parts of a bucket but the last ones have the same size, a multiple of `ALIGN_BYTES`: a kernel that treats the end of
a vector otherwise than its middle then rounds as it does on the whole vector.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from paragan.comm.bucket import Bucket
from paragan.comm.flat_params import ALIGN_BYTES, FlatParams
from paragan.comm.process_group import Group

MAX_IN_FLIGHT = 3  # buckets: gloo has two in flight at a time. Each takes memory of its size


def part_numel(numel: int, itemsize: int, ranks: int) -> int:
    """Return the size of the parts of a bucket of `numel` numbers; the last ones may be smaller, or empty."""
    step = ALIGN_BYTES // itemsize
    return -(-numel // (ranks * step)) * step


def local_part(bucket: Bucket, group: Group) -> slice:
    """Return the part of a bucket that this rank owns."""
    numel = len(bucket.params)
    size = part_numel(numel, bucket.params.itemsize, group.size)
    return slice(min(numel, group.rank * size), min(numel, (group.rank + 1) * size))


def padded(x: Tensor, numel: int) -> Tensor:
    """Return x [n] with zeros behind it, [numel]; x itself if it has this size."""
    return x if len(x) == numel else torch.cat([x, x.new_zeros(numel - len(x))])


class _Gather:
    """The parameters of a bucket, in flight from their owners to all ranks."""

    def __init__(self, bucket: Bucket, group: Group):
        self._params = bucket.params
        size = part_numel(len(self._params), self._params.itemsize, group.size)
        self._is_direct = size * group.size == len(self._params)  # all parts have the same size
        rows = self._params.view(-1, size) if self._is_direct else self._params.new_empty(group.size, size)
        own = padded(self._params[local_part(bucket, group)], size)
        self._rows, self._work = group.all_gather(own, rows)

    def wait(self) -> None:
        self._work.wait()
        if not self._is_direct:
            self._params.copy_(self._rows.flatten()[: len(self._params)])


class FlatShards:
    """The parts of a player's flat vectors that this rank owns.

    Args:
        flat: the vectors, of which every rank has all numbers.
        group: the ranks that own parts.
    """

    def __init__(self, flat: FlatParams, group: Group):
        self.flat = flat
        self.group = group
        self._starts: list[int] = []  # of the buckets
        start = 0
        for bucket in flat.buckets:
            self._starts.append(start)
            start += len(bucket.params)

    def pieces(self, span: slice) -> list[slice]:
        """Return what this rank owns of a slice of the vector, in order; one empty slice if it is nothing."""
        owned: list[slice] = []
        for bucket, first in zip(self.flat.buckets, self._starts):
            part = local_part(bucket, self.group)
            start = max(span.start, first + part.start)
            stop = min(span.stop, first + part.stop)
            if start < stop:
                owned.append(slice(start, stop))
        return owned or [slice(span.start, span.start)]

    def gather_params(self) -> None:
        """Give all ranks the parameters of every owner. All ranks call this."""
        in_flight = deque[_Gather]()
        for bucket in self.flat.buckets:
            if len(in_flight) == MAX_IN_FLIGHT:
                in_flight.popleft().wait()
            in_flight.append(_Gather(bucket, self.group))
        while in_flight:
            in_flight.popleft().wait()

    def gather(self, values: Sequence[Tensor], span: slice, is_receiver: bool) -> Tensor | None:
        """Gather a vector that has a number for each parameter. All ranks call this.

        Args:
            values: of the pieces of this rank (`pieces`).
            span: the slice of the flat vector that the vector belongs to.
            is_receiver: whether this rank wants it.

        Returns:
            The vector [span.stop - span.start], in the memory of the host; None for other ranks.
        """
        remaining = iter(values)
        whole = values[0].new_empty(span.stop - span.start, device="cpu") if is_receiver else None
        for bucket, first in zip(self.flat.buckets, self._starts):
            start = max(span.start, first)
            stop = min(span.stop, first + len(bucket.params))
            if start >= stop:
                continue
            part = local_part(bucket, self.group)
            size = part_numel(len(bucket.params), bucket.params.itemsize, self.group.size)
            row = values[0].new_zeros(size)
            if max(start, first + part.start) < min(stop, first + part.stop):
                value = next(remaining)
                offset = max(start, first + part.start) - first - part.start
                row[offset : offset + len(value)] = value
            rows, work = self.group.all_gather(row)
            work.wait()
            if whole is not None:
                whole[start - span.start : stop - span.start] = rows.flatten()[start - first : stop - first]
        return whole
