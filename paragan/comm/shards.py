"""A bucket's gradients, cut into one shard a rank and encoded: what `CompressedSum` sends, and what it does with it."""

from __future__ import annotations

import torch
from torch import Tensor

from .compress import Compressor, naming
from .flat import Bucket


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
