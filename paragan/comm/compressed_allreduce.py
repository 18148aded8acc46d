"""The all-reduce over a lossy wire, with error feedback.

Every rank is the server for one shard of the bucket. Each encodes its gradient and sends every shard to its owner; the
owner averages what it received, encodes the mean and sends it to all.

What the wire loses is the *residual*. It is kept in the bucket state "residual", in units of the gradient, so it is
checkpointed, and it is added to the next gradient. `Compressor.feedback` says which share of it is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Never

import torch
from torch import Tensor

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, Bucket, Exchange, ExchangeEvent
from paragan.comm.compression.compressors import Compressor, wire_errors
from paragan.comm.process_group import CommunicationError, Group, Work
from paragan.comm.traffic import Traffic, all_to_all, ring_all_gather
from paragan.core.errors import Diverged
from paragan.core.host_copies import HostCopy


def shard_length(n: int, size: int) -> int:
    """Return how many of n numbers each of `size` ranks owns; the last shard is padded with zeros."""
    return max(1, -(-n // size))


class GradientShards:
    """The vectors of one bucket in one step, all in its workspaces.

    outgoing     : [size, length] what this rank sends: `size` times its gradient, plus its residual
    new_residual : [size, length] what the wire loses of it, times `feedback`
    codes        : [size, nbytes] the encoded rows of `outgoing`, row j for rank j
    received     : [size, nbytes] encoded rows, row j from rank j
    slices       : of the bucket, one for each shard
    """

    def __init__(self, bucket: Bucket, wire: Compressor, size: int, feedback: float):
        self.bucket, self.wire, self.size, self.feedback = bucket, wire, size, feedback
        n = bucket.grads.numel()
        self.length = length = shard_length(n, size)
        self.slices = [slice(min(r * length, n), min((r + 1) * length, n)) for r in range(size)]
        self.outgoing = bucket.workspace("outgoing", size, length)
        self.residual = bucket.state("residual") if feedback else None
        self.new_residual = bucket.workspace("new_residual", size, length)
        if self.residual is not None and self.residual.data_ptr() == self.new_residual.data_ptr():
            # `commit_residual` of the step before keeps the residual in this workspace: use the other one
            self.new_residual = bucket.workspace("new_residual 2", size, length)
        nbytes = wire.nbytes(length)
        self.codes = bucket.workspace("codes", size, nbytes, dtype=torch.uint8)
        self.received = bucket.workspace("received", size, nbytes, dtype=torch.uint8)

    def encode_gradient(self, seed: int) -> Tensor:
        """Compute p = g + e and Q(p), shard by shard while it is in the cache.

        Returns:
            `codes`, [size, nbytes].
        """
        for owner, part in enumerate(self.slices):
            row = self.outgoing[owner, : part.stop - part.start]  # the padding after it stays zero
            if self.residual is None:
                torch.mul(self.bucket.grads[part], self.size, out=row)
            else:
                torch.add(self.residual[part], self.bucket.grads[part], alpha=self.size, out=row)
            self._encode(self.outgoing[owner], self.codes[owner], seed)
            self._decode(self.codes[owner], self.new_residual[owner])
            torch.sub(self.outgoing[owner], self.new_residual[owner], out=self.new_residual[owner])
            if 0 < self.feedback < 1:
                self.new_residual[owner] *= self.feedback
        return self.codes

    def roundtrip(self, seed: int) -> Tensor:
        """Return `outgoing` after encoding and decoding, [size, length]. Overwrites `codes` and `new_residual`."""
        for row, code, out in zip(self.outgoing, self.codes, self.new_residual):
            self._encode(row, code, seed)
            self._decode(code, out)
        return self.new_residual

    def encode_mean(self, rank: int, seed: int) -> Tensor:
        """Compute m, the mean of the `received` rows of this rank's shard, and Q(m).

        Returns:
            Q(m), [nbytes].
        """
        mean = self.bucket.workspace("mean", self.length)
        decoded = self.bucket.workspace("decoded", self.length)
        self._decode(self.received[0], mean)
        for row in self.received[1:]:
            self._decode(row, decoded)
            mean += decoded
        mean /= self.size
        self._encode(mean, self.codes[0], seed)
        self._decode(self.codes[0], decoded)
        self.new_residual[rank].add_(mean.sub_(decoded), alpha=self.size * self.feedback)
        return self.codes[0]

    def decode_mean(self, encoded_means: Tensor) -> None:
        """Write the means of all shards, encoded [size, nbytes], to the gradients."""
        decoded = self.bucket.workspace("decoded", self.length)
        for row, part in zip(encoded_means, self.slices):
            count = part.stop - part.start
            if count == self.length:
                self._decode(row, self.bucket.grads[part])
            elif count:  # the last shard, padded
                self._decode(row, decoded)
                self.bucket.grads[part].copy_(decoded[:count])

    def commit_residual(self) -> None:
        """Make `new_residual` the bucket's residual, without a copy."""
        if self.feedback:
            self.bucket.states["residual"] = self.unshard(self.new_residual)

    def _encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        with wire_errors(self.wire):
            self.wire.encode(x, out, seed)

    def _decode(self, data: Tensor, out: Tensor) -> None:
        with wire_errors(self.wire):
            self.wire.decode(data, out)

    def unshard(self, rows: Tensor) -> Tensor:
        """Return rows [size, length] as a view [n] without the padding."""
        return rows.view(-1)[: self.bucket.grads.numel()]


@dataclass(frozen=True)
class CompressedAllReduce:
    """Sum the group's shares over a lossy wire in both directions, with error feedback (after DQGAN, Chen et al. 2020).

    Each rank is the server for one shard. Unlike the paper's server it quantizes its answer, and what that loses is
    fed back too; the paper's own form is comm/quantized_descent.py.

        p = g + e;  send Q(p);  e <- p - Q(p)                 every rank, for every shard; g is its share times size
        m = mean of Q(p);  send Q(m);  e += size (m - Q(m))   the owner of the shard, whose loss concerns the mean
        g <- Q(m)

    A rank sends 2 (size - 1) / size of the encoded vector, however many ranks there are. What is still to be sent is
    the mean of the residuals over ranks, and the rule for a changed number of ranks (checkpoints) conserves it. A
    gradient that is not finite reaches every rank as NaN: all refuse the step, and the residuals keep their values.

    feedback     : the share of e that is kept. Below 1, old residuals fade: they concern an opponent that has moved on.
    answer_group : carries Q(m); None: `group`. Another one where several threads continue exchanges, so that each group
                   gets its messages in the same order on all ranks
    """

    wire: Compressor
    group: Group
    feedback: float = 1.0
    answer_group: Group | None = None

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        size, rank = self.group.size, self.group.rank
        shards = GradientShards(bucket, self.wire, size, self.feedback)
        seed = zlib.crc32(f"{step} {rank} {bucket.index}".encode()) >> 1 & ~1  # seed + 1 is that of the mean
        yield GRAD_READY
        yield self.group.all_to_all(shards.encode_gradient(seed), shards.received)
        answer_group = self.answer_group or self.group
        encoded_means, work = answer_group.all_gather(shards.encode_mean(rank, seed + 1), shards.received)
        yield work
        shards.decode_mean(encoded_means)
        check = FiniteCheck(bucket.grads)
        yield check
        if not check.is_finite:
            causes = (
                (shards.unshard(shards.outgoing), "not finite"),
                (shards.unshard(shards.roundtrip(seed=0)), f"too large for the {self.wire.name} wire"),
            )
            raise_non_finite(bucket, causes, self.wire)
        yield ALL_RECEIVED
        shards.commit_residual()

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return what one rank sends in one step."""
        size = self.group.size
        nbytes = self.wire.nbytes(shard_length(n, size))
        return all_to_all(size * nbytes, size) + ring_all_gather(nbytes, size)


@dataclass(frozen=True)
class DeliverNonFinite:
    """Deliver NaN to all ranks where `inner` refuses a gradient, for a GradScaler, which then skips the step."""

    inner: Exchange

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        try:
            yield from self.inner(bucket, step)
        except (Diverged, NonFiniteMessage):
            bucket.grads.fill_(torch.nan)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return self.inner.traffic(n, itemsize)


class FiniteCheck:
    """Check that all numbers of some vectors are finite, by their sums: in float32, since one in float16 may overflow.

    It is work in flight: buckets whose checks are all under way wait for their device once, and not each by itself.
    """

    def __init__(self, *vectors: Tensor):
        sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in vectors]
        self._are_finite = HostCopy(torch.stack(sums).isfinite().all())

    def wait(self) -> None:
        """Wait for the device."""
        self._are_finite.wait()

    @property
    def is_finite(self) -> bool:
        """Return the result."""
        return bool(self._are_finite.wait())


class NonFiniteMessage(CommunicationError):
    """A rank sent numbers that are not finite: all ranks refuse the step."""


def raise_non_finite(bucket: Bucket, causes: Iterable[tuple[Tensor, str]], wire: Compressor) -> Never:
    """Refuse the step because a gradient is not finite. All ranks call this.

    Args:
        causes: vectors [n] of this rank, and what is wrong with its gradient if one has such numbers.

    Raises:
        Diverged: this rank sent it; names the parameter.
        NonFiniteMessage: another rank did.
    """
    for vector, cause in causes:
        bad = vector.isfinite().logical_not().nonzero()
        if len(bad):
            name = bucket.parameter_at(int(bad[0]))
            raise Diverged(f"the gradient of {name} is {cause}: the step was refused")
    raise NonFiniteMessage(f"the {wire.name} wire delivered numbers that are not finite: the step was refused")
