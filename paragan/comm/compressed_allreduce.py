"""TODO: docstring of paragan/comm/compressed_allreduce.py"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import Never

import torch
from torch import Tensor

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, Bucket, ExchangeEvent
from paragan.comm.compression.compressors import Compressor, wire_errors
from paragan.comm.process_group import CommunicationError, Group, Work
from paragan.comm.traffic import Traffic, all_to_all, ring_all_gather
from paragan.core.errors import Diverged


def shard_length(n: int, size: int) -> int:
    """How many of n numbers travel to each of `size` ranks, filled up with zeros."""
    return max(1, -(-n // size))


class GradientShards:
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
        self.outgoing = bucket.workspace("sent", size, length)
        self.residual = bucket.state("error") if feedback else None
        self.new_residual = bucket.workspace("left", size, length)
        if (
            self.residual is not None and self.residual.data_ptr() == self.new_residual.data_ptr()
        ):  # kept there by the step before
            self.new_residual = bucket.workspace("left, next", size, length)
        nbytes = wire.nbytes(length)
        self.codes, self.received = (
            bucket.workspace(name, size, nbytes, dtype=torch.uint8) for name in ("codes", "inbox")
        )

    def encode_gradient(self, seed: int) -> Tensor:
        """p = g + e, and Q(p), shard by shard while it is in the cache: `codes`."""
        for to, here in enumerate(self.slices):
            own = self.outgoing[to, : here.stop - here.start]  # beyond it stay zeros
            if self.residual is None:
                torch.mul(self.bucket.grads[here], self.size, out=own)
            else:
                torch.add(self.residual[here], self.bucket.grads[here], alpha=self.size, out=own)
            self._encode(self.outgoing[to], self.codes[to], seed)
            self._decode(self.codes[to], self.new_residual[to])
            torch.sub(self.outgoing[to], self.new_residual[to], out=self.new_residual[to])
            if 0 < self.feedback < 1:
                self.new_residual[to] *= self.feedback
        return self.codes

    def roundtrip(self, seed: int) -> Tensor:
        """What becomes of `sent` on the wire, [size, length]; `codes` and `left` are overwritten."""
        for row, code, out in zip(self.outgoing, self.codes, self.new_residual):
            self._encode(row, code, seed)
            self._decode(code, out)
        return self.new_residual

    def encode_mean(self, rank: int, seed: int) -> Tensor:
        """m, the mean of what `inbox` brought for this rank's shard, and Q(m): one row of codes."""
        mean, part = (self.bucket.workspace(name, self.length) for name in ("mean", "part"))
        self._decode(self.received[0], mean)
        for row in self.received[1:]:
            self._decode(row, part)
            mean += part
        mean /= self.size
        self._encode(mean, self.codes[0], seed)
        self._decode(self.codes[0], part)
        self.new_residual[rank].add_(mean.sub_(part), alpha=self.size * self.feedback)
        return self.codes[0]

    def decode_mean(self, encoded_means: Tensor) -> None:
        """Everyone's answers [size, bytes] become the gradients."""
        part = self.bucket.workspace("part", self.length)
        for row, here in zip(encoded_means, self.slices):
            count = here.stop - here.start
            if count == self.length:
                self._decode(row, self.bucket.grads[here])
            elif count:  # the last, filled up
                self._decode(row, part)
                self.bucket.grads[here].copy_(part[:count])

    def commit_residual(self) -> None:
        """What was lost becomes the bucket's memory as it lies: a step ends without a pass over it."""
        if self.feedback:
            self.bucket.states["error"] = self.unshard(self.new_residual)

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        with wire_errors(self.wire):
            self.wire.encode(x, out, seed)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        with wire_errors(self.wire):
            self.wire.decode(data, out)

    def unshard(self, rows: Tensor) -> Tensor:
        """[size, length] as the bucket's [n]."""
        return rows.view(-1)[: self.bucket.grads.numel()]


@dataclass(frozen=True)
class CompressedAllReduce:
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

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        size, rank = self.group.size, self.group.rank
        shards = GradientShards(bucket, self.wire, size, self.feedback)
        seed = zlib.crc32(f"{step} {rank} {bucket.index}".encode()) >> 1 & ~1  # and seed + 1, for the answer
        yield GRAD_READY
        yield self.group.all_to_all(shards.encode_gradient(seed), shards.received)
        answers, work = self.group.all_gather(shards.encode_mean(rank, seed + 1), shards.received)
        yield work
        shards.decode_mean(answers)
        if not bucket.grads.sum().isfinite():
            raise_non_finite(bucket, shards, self.wire)
        yield ALL_RECEIVED
        shards.commit_residual()

    def traffic(self, n: int) -> Traffic:
        size, nbytes = self.group.size, self.wire.nbytes(shard_length(n, self.group.size))
        return all_to_all(size * nbytes, size) + ring_all_gather(nbytes, size)


class NonFiniteMessage(CommunicationError):
    """A wire brought numbers that are not finite, from whichever rank: all refuse the step."""


def raise_non_finite(bucket: Bucket, shards: GradientShards, wire: Compressor) -> Never:
    """Every rank refuses a step in which one rank's gradient was not finite; that rank says where."""
    for vector, what in (
        (shards.outgoing, "not finite"),
        (shards.roundtrip(seed=0), f"too large for the {wire.name} wire"),
    ):
        bad = shards.unshard(vector).isfinite().logical_not().nonzero()
        if len(bad):
            name = bucket.parameter_at(int(bad[0]))
            raise Diverged(f"the gradient of {name} is {what}: the step was refused")
    raise NonFiniteMessage(f"the {wire.name} wire brought numbers that are not finite: the step was refused")
