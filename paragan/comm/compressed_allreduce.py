"""TODO: docstring of paragan/comm/compressed_allreduce.py"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Never

import torch
from torch import Tensor

from paragan.comm.bucket import ARRIVED, GRADIENT, Bucket, Moment
from paragan.comm.compression.compressors import Compressor, naming
from paragan.comm.process_group import Group, Lost, Work
from paragan.comm.traffic import Traffic, all_to_all, ring_all_gather
from paragan.core.errors import Diverged


def shard_length(n: int, size: int) -> int:
    """How many of n numbers travel to each of `size` ranks, filled up with zeros."""
    return max(1, -(-n // size))


class Shards:
    """The vectors of one bucket in one step, all in its scratch memory.

    sent  : [size, length] what this rank is to send: `size` times its gradient, and what it still owes
    left  : [size, length] what the wire lost of it, times `feedback`: what will be owed
    codes : [size, bytes] the same encoded, row j for rank j;  inbox: row j from rank j
    """

    def __init__(self, bucket: Bucket, wire: Compressor, size: int, feedback: float):
        self.bucket, self.wire, self.size, self.feedback = bucket, wire, size, feedback
        n = bucket.grads.numel()
        self.length = length = shard_length(n, size)
        self.slices = [slice(min(r * length, n), min((r + 1) * length, n)) for r in range(size)]
        self.sent = bucket.scratch("sent", size, length)
        self.owed = bucket.memory("error") if feedback else None
        self.left = bucket.scratch("left", size, length)
        if self.owed is not None and self.owed.data_ptr() == self.left.data_ptr():  # kept there by the step before
            self.left = bucket.scratch("left, next", size, length)
        nbytes = wire.nbytes(length)
        self.codes, self.inbox = (bucket.scratch(name, size, nbytes, dtype=torch.uint8) for name in ("codes", "inbox"))

    def offer(self, seed: int) -> Tensor:
        """p = g + e, and Q(p), shard by shard while it is in the cache: `codes`."""
        for to, here in enumerate(self.slices):
            own = self.sent[to, : here.stop - here.start]  # beyond it stay zeros
            if self.owed is None:
                torch.mul(self.bucket.grads[here], self.size, out=own)
            else:
                torch.add(self.owed[here], self.bucket.grads[here], alpha=self.size, out=own)
            self._encode(self.sent[to], self.codes[to], seed)
            self._decode(self.codes[to], self.left[to])
            torch.sub(self.sent[to], self.left[to], out=self.left[to])
            if 0 < self.feedback < 1:
                self.left[to] *= self.feedback
        return self.codes

    def arriving(self, seed: int) -> Tensor:
        """What becomes of `sent` on the wire, [size, length]; `codes` and `left` are overwritten."""
        for row, code, out in zip(self.sent, self.codes, self.left):
            self._encode(row, code, seed)
            self._decode(code, out)
        return self.left

    def answer(self, rank: int, seed: int) -> Tensor:
        """m, the mean of what `inbox` brought for this rank's shard, and Q(m): one row of codes."""
        mean, part = (self.bucket.scratch(name, self.length) for name in ("mean", "part"))
        self._decode(self.inbox[0], mean)
        for row in self.inbox[1:]:
            self._decode(row, part)
            mean += part
        mean /= self.size
        self._encode(mean, self.codes[0], seed)
        self._decode(self.codes[0], part)
        self.left[rank].add_(mean.sub_(part), alpha=self.size * self.feedback)
        return self.codes[0]

    def take(self, answers: Tensor) -> None:
        """Everyone's answers [size, bytes] become the gradients."""
        part = self.bucket.scratch("part", self.length)
        for row, here in zip(answers, self.slices):
            count = here.stop - here.start
            if count == self.length:
                self._decode(row, self.bucket.grads[here])
            elif count:  # the last, filled up
                self._decode(row, part)
                self.bucket.grads[here].copy_(part[:count])

    def keep(self) -> None:
        """What was lost becomes the bucket's memory as it lies: a step ends without a pass over it."""
        if self.feedback:
            self.bucket.memories["error"] = self.whole(self.left)

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        with naming(self.wire):
            self.wire.encode(x, out, seed)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        with naming(self.wire):
            self.wire.decode(data, out)

    def whole(self, rows: Tensor) -> Tensor:
        """[size, length] as the bucket's [n]."""
        return rows.view(-1)[: self.bucket.grads.numel()]


@dataclass(frozen=True)
class CompressedSum:
    """Every rank gets the sum of the group's shares, over a lossy wire both ways; what the wire loses is kept
    and sent with the next step (Chen et al. 2020, with each rank in the server's place for one shard).

        p = g + e;  send Q(p);  e <- p - Q(p)          every rank, for every shard; g is its share times the ranks
        m = mean of Q(p);  send Q(m);  e += ranks (m - Q(m))    the shard's owner: that loss is owed to the mean
        g <- Q(m)

    A rank sends 2 (size - 1) / size of the encoded vector however many ranks there are. The mean of the residuals
    over ranks is what is owed, and the rule for a changed world conserves it. A gradient that is not finite reaches
    every rank as NaN: all refuse the step, and the residuals stay as they were. With a `feedback` below 1 that share of
    e is kept: an old debt is about an opponent that has moved on.
    """

    wire: Compressor
    group: Group
    feedback: float = 1.0

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | Moment]:
        size, rank = self.group.size, self.group.rank
        shards = Shards(bucket, self.wire, size, self.feedback)
        seed = zlib.crc32(f"{step} {rank} {bucket.index}".encode()) >> 1 & ~1  # and seed + 1, for the answer
        yield GRADIENT
        yield self.group.transpose(shards.offer(seed), shards.inbox)
        answers, work = self.group.gather(shards.answer(rank, seed + 1), shards.inbox)
        yield work
        shards.take(answers)
        if not bucket.grads.sum().isfinite():
            refuse(bucket, shards, self.wire)
        yield ARRIVED
        shards.keep()

    def traffic(self, n: int) -> Traffic:
        size, nbytes = self.group.size, self.wire.nbytes(shard_length(n, self.group.size))
        return all_to_all(size * nbytes, size) + ring_all_gather(nbytes, size)


class NotFinite(Lost):
    """A wire brought numbers that are not finite, from whichever rank: all refuse the step."""


def refuse(bucket: Bucket, shards: Shards, wire: Compressor) -> Never:
    """Every rank refuses a step in which one rank's gradient was not finite; that rank says where."""
    for vector, what in ((shards.sent, "not finite"), (shards.arriving(seed=0), f"too large for the {wire.name} wire")):
        bad = shards.whole(vector).isfinite().logical_not().nonzero()
        if len(bad):
            name = bucket.parameter_at(int(bad[0]))
            raise Diverged(f"the gradient of {name} is {what}: the step was refused")
    raise NotFinite(f"the {wire.name} wire brought numbers that are not finite: the step was refused")
