"""Exchanges: how the replicas of one player agree, written as generators over a bucket.

A generator starts when the round does. `yield TURN` waits until this player's turn begins: before it nobody may move
the parameters, since others play against them. `yield GRADIENT` waits until backward has filled the bucket; yielding
work waits until it has arrived, which is looked at after backward; `yield ARRIVED` waits until all work of the beat
has, so that nobody differentiates through us any more and the step will be taken. The optimizer steps when every
generator has ended. What must outlive a step is a `bucket.memory(name)`, and is checkpointed as a matter of course.

A rank's gradient is its *share*: the sum over its lanes divided by all lanes of the team. The team's
gradient is therefore a sum, whatever the lanes each rank owns, and never a mean of rank means.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, TURN_STARTED, Bucket, Exchange, ExchangeEvent
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Traffic, ring_all_reduce


@dataclass(frozen=True)
class NoExchange:
    """No one to agree with."""

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield from ()

    def traffic(self, n: int) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class ResetAndSkip(NoExchange):
    """No one to agree with any more: where they were, and what was owed to them, is forgotten."""

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        for name in ("anchor", "error"):
            bucket.states.pop(name, None)
        yield from ()


@dataclass(frozen=True)
class AllReduce:
    """Every rank gets the sum of the group's shares: the gradient of the total batch."""

    group: Group

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield GRAD_READY  # until backward has filled this bucket
        yield self.group.all_reduce_sum(bucket.grads)  # travels while backward goes on elsewhere

    def traffic(self, n: int) -> Traffic:
        return ring_all_reduce(4 * n, self.group.size)


@dataclass(frozen=True)
class Blocking:
    """`inner`, waited for on the spot, before the forward pass: what follows sees its result."""

    inner: Exchange

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield TURN_STARTED
        for awaited in self.inner(bucket, step):
            assert not isinstance(awaited, ExchangeEvent), "there is no gradient yet"
            awaited.wait()

    def traffic(self, n: int) -> Traffic:
        return self.inner.traffic(n)


@dataclass(frozen=True)
class Chain:
    """One exchange after another."""

    first: Exchange
    second: Exchange

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield from self.first(bucket, step)
        yield from self.second(bucket, step)

    def traffic(self, n: int) -> Traffic:
        return self.first.traffic(n) + self.second.traffic(n)


@dataclass(frozen=True)
class EveryN:
    """`inner` at the end of every `period` steps; nothing in between. `traffic` is the mean over a period."""

    inner: Exchange
    period: int

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        if (step + 1) % self.period == 0:
            yield from self.inner(bucket, step // self.period)

    def traffic(self, n: int) -> Traffic:
        once = self.inner.traffic(n)
        return Traffic(round(once.sent_bytes / self.period), round(once.messages / self.period))


@dataclass(frozen=True)
class LocalSGD:
    """Steps on one's own gradient; every `period` steps, before the next, all go on from the mean of where they are
    (local SGD: Stich 2019; for games: Deng and Mahdavi 2021). What travels is how far each has come since the last
    mean, as a gradient does, so over any wire.

    weight : this rank's share of the gradient. The mean counts every rank by it.
    """

    inner: Exchange
    period: int
    weight: float

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield TURN_STARTED
        begun = "anchor" in bucket.states
        anchor = bucket.state("anchor")  # where all were when they agreed last
        if not begun:
            anchor.copy_(bucket.params)
        if step % self.period == 0:
            torch.sub(anchor, bucket.params, out=bucket.grads).mul_(self.weight)
            for awaited in self.inner(bucket, step):
                if not isinstance(awaited, ExchangeEvent):
                    awaited.wait()
            bucket.params.copy_(anchor.sub_(bucket.grads))
            bucket.grads.zero_()
        yield GRAD_READY
        bucket.grads.div_(self.weight)

    def traffic(self, n: int) -> Traffic:
        """The mean over a period."""
        once = self.inner.traffic(n)
        return Traffic(round(once.sent_bytes / self.period), round(once.messages / self.period))


@dataclass(frozen=True)
class OptimisticMirrorDescent:
    """Optimistic mirror descent: the gradient is taken one step ahead, with the one before it, and the step
    itself made from where we were (Chen et al. 2020; Popov 1980).

        w_half = w - rate (F_prev + e);  F = gradient at w_half;  then `inner`, then w <- w - rate F

    F_prev is this rank's own last gradient; e is its residual where `inner` keeps one, and `residual` can leave it out.
    The optimizer has to be plain gradient descent with the same rate. weight: this rank's share of the gradient.
    """

    inner: Exchange
    get_lr: Callable[[], float]
    weight: float = 1.0
    include_residual: bool = True

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield TURN_STARTED
        here = bucket.workspace("here", bucket.params.numel()).copy_(bucket.params)
        previous = bucket.state("previous")
        bucket.params.sub_(previous, alpha=self.get_lr())
        if self.include_residual and "error" in bucket.states:
            bucket.params.sub_(bucket.state("error"), alpha=self.get_lr())
        try:
            yield GRAD_READY
            own = torch.div(bucket.grads, self.weight, out=bucket.workspace("own", bucket.grads.numel()))
            yield from self.inner(bucket, step)
            yield ALL_RECEIVED
            previous.copy_(own)
        finally:  # also where the step is given up
            bucket.params.copy_(here)

    def traffic(self, n: int) -> Traffic:
        return self.inner.traffic(n)
