"""The update of DQGAN as its paper has it: optimistic mirror descent with quantized steps and error feedback.

Chen, Yang, Shen and Pang, "A Distributed Training Algorithm of Generative Adversarial Networks with Quantized
Gradients", arXiv 2010.13359, algorithm 2. The exchange that this project uses by default is another one
(comm/compressed_allreduce.py); docs/quantized.md compares them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, TURN_STARTED, Bucket, ExchangeEvent
from paragan.comm.compressed_allreduce import FiniteCheck, raise_non_finite
from paragan.comm.compression.compressors import Compressor, wire_errors
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Traffic, ring_all_gather, ring_all_reduce


@dataclass(frozen=True)
class QuantizedDescent:
    """Step by the mean over ranks of quantized steps.

        w_half = w - (lr F_prev + e)          every rank looks ahead, with its own previous gradient and residual
        p = lr F(w_half) + e                  the step that it would take
        send Q(p);  e <- p - Q(p)             the residual is in units of a step
        w <- w - mean of Q(p)

    A bucket is the whole vector of a network. Every rank sends its code to all others, and averages what it receives:
    the paper's server, whose answer is not quantized. So a rank sends (size - 1) codes. Ranks count alike, however many
    lanes each has. Numbers are rounded to float32 before they are encoded. The first round only takes the gradient at
    the start, which is the first F_prev.

    get_lr           : the learning rate of the optimizer, which has to be plain SGD
    weight           : this rank's part of the total batch
    feedback         : the share of e that is kept
    include_residual : whether e is part of the look-ahead
    """

    wire: Compressor
    group: Group
    get_lr: Callable[[], float]
    weight: float = 1.0
    feedback: float = 1.0
    include_residual: bool = True

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield TURN_STARTED
        lr = self.get_lr()
        n = bucket.params.numel()
        takes_step = lr > 0 and "previous" in bucket.states
        previous = bucket.state("previous")
        residual = bucket.state("step_residual")
        if lr > 0 and "residual" in bucket.states:  # of a run with the default form, in units of a gradient
            residual.add_(bucket.states.pop("residual"), alpha=lr)
        original = bucket.workspace("original params", n).copy_(bucket.params)
        bucket.params.sub_(previous, alpha=lr)
        if self.include_residual:
            bucket.params.sub_(residual)
        try:
            yield GRAD_READY
            gradient = torch.div(bucket.grads, self.weight, out=bucket.workspace("local grad", n))
            p = bucket.workspace("step", n).zero_()
            if takes_step:
                torch.add(residual, gradient, alpha=lr, out=p)
            sent = yield from self._average(bucket, p, step)
            check = FiniteCheck(bucket.grads, gradient)
            yield check
            if not check.is_finite:
                causes = ((gradient, "not finite"), (sent, f"too large for the {self.wire.name} wire"))
                raise_non_finite(bucket, causes, self.wire)
            yield ALL_RECEIVED
            previous.copy_(gradient)
            if takes_step:
                torch.sub(p, sent, out=residual).mul_(self.feedback)
                bucket.grads.div_(lr)
                bucket.zero_padding(residual)  # some wires encode 0 as another number
                bucket.zero_padding(bucket.grads)
            else:
                bucket.grads.zero_()
        finally:  # also if the step is aborted
            bucket.params.copy_(original)

    def _average(self, bucket: Bucket, p: Tensor, step: int) -> Generator[Work, None, Tensor]:
        """Write the mean of Q(p) over ranks to the gradients, and return this rank's Q(p)."""
        if not self._is_quantized:
            torch.div(p, self.group.size, out=bucket.grads)
            yield self.group.all_reduce_sum(bucket.grads)
            return p
        size, rank = self.group.size, self.group.rank
        n = p.numel()
        nbytes = self.wire.nbytes(n)
        code = bucket.workspace("code", nbytes, dtype=torch.uint8)
        decoded = bucket.workspace("decoded", n, dtype=torch.float32)
        sent = bucket.workspace("sent", n)
        with wire_errors(self.wire):
            seed = zlib.crc32(f"{step} {rank} {bucket.index}".encode()) >> 1
            self.wire.encode(decoded.copy_(p), code, seed)
        codes, work = self.group.all_gather(code, bucket.workspace("codes", size, nbytes, dtype=torch.uint8))
        yield work
        bucket.grads.zero_()
        for j in range(size):
            with wire_errors(self.wire):
                self.wire.decode(codes[j], decoded)
            bucket.grads.add_(decoded)
            if j == rank:
                sent.copy_(decoded)
        bucket.grads.div_(size)
        return sent

    @property
    def _is_quantized(self) -> bool:
        return self.wire.lossy and self.group.size > 1

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return what one rank sends in one step."""
        if self._is_quantized:
            return ring_all_gather(self.wire.nbytes(n), self.group.size)
        return ring_all_reduce(itemsize * n, self.group.size)
