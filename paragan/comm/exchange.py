"""Exchanges: how the replicas of one player agree, written as generators over a bucket.

All generators start when the round does, so what is known then is sent at once. Each yields what it waits for:

* `TURN_STARTED`: this player's turn begins. Before it the parameters must not change, since the opponent uses them;
  only `OuterOptimizer` (outer_optimizer.py) moves both players before any turn.
* `GRAD_READY`: backward has filled the bucket. It continues from a backward hook, in bucket order on all ranks.
* work: the message has arrived. This is waited for after backward, so that messages overlap with it.
* `ALL_RECEIVED`: all messages of the turns that move together have arrived. Nothing differentiates through the
  parameters any more, and the step will be applied.

The optimizer steps when every generator has ended. No generator of this file outlives a round, so there is no hidden
state to save: what must persist is a `bucket.state(name)`, which is always checkpointed. Exchanges whose messages may
be in flight between rounds (outer_optimizer.py, async_gossip.py) have a `drain`, which comes before a checkpoint.

A rank's gradient is its *share*: the sum over its lanes divided by the number of lanes of the team. The team's gradient
is therefore the sum of the shares, however many lanes each rank owns, and never a mean of the ranks' means.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

from paragan.comm.bucket import ALL_RECEIVED, GRAD_READY, TURN_STARTED, Bucket, Exchange, ExchangeEvent
from paragan.comm.process_group import Group, Work
from paragan.comm.traffic import Traffic, mean_traffic, ring_all_reduce


@dataclass(frozen=True)
class NoExchange:
    """No exchange: there is one replica only."""

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield from ()

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class ResetAndSkip(NoExchange):
    """No exchange any more: the states of former exchanges (anchor, residual, momentum) are dropped."""

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        bucket.states.clear()
        yield from ()


@dataclass(frozen=True)
class AllReduce:
    """Sum the shares of the group: every rank gets the gradient of the total batch."""

    group: Group

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield GRAD_READY  # wait until backward has filled this bucket
        yield self.group.all_reduce_sum(bucket.grads)  # overlaps with the rest of backward

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return ring_all_reduce(itemsize * n, self.group.size)


@dataclass(frozen=True)
class Blocking:
    """Complete `inner` at the start of the turn, before the forward pass, which then uses its result."""

    inner: Exchange

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield TURN_STARTED
        for awaited in self.inner(bucket, step):
            assert not isinstance(awaited, ExchangeEvent), "there is no gradient yet"
            awaited.wait()

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return self.inner.traffic(n, itemsize)


@dataclass(frozen=True)
class Chain:
    """Run one exchange after another."""

    first: Exchange
    second: Exchange

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield from self.first(bucket, step)
        yield from self.second(bucket, step)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return self.first.traffic(n, itemsize) + self.second.traffic(n, itemsize)


@dataclass(frozen=True)
class EveryN:
    """Run `inner` at the end of every `period` steps, and nothing in between."""

    inner: Exchange
    period: int

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        if (step + 1) % self.period == 0:
            yield from self.inner(bucket, step // self.period)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return the mean over a period."""
        return mean_traffic(self.inner.traffic(n, itemsize), self.period)


@dataclass(frozen=True)
class LocalGradient:
    """Step on this rank's own gradient: nothing is sent.

    weight : this rank's part of the total batch
    """

    weight: float

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield GRAD_READY
        bucket.grads.div_(self.weight)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class Accumulate:
    """Sum this rank's gradients over `period` rounds, then exchange their mean.

    The optimizer steps at the end of a period only (`Turn.step_period`). The sum is a bucket state, multiplied by the
    number of ranks, so that the rule for a changed number of ranks (checkpoints) conserves it.

    ranks : that `inner` sums over
    """

    inner: Exchange
    period: int
    ranks: int = 1

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        accumulated = bucket.state("accumulated")
        yield GRAD_READY
        if (step + 1) % self.period:
            yield ALL_RECEIVED
            accumulated.add_(bucket.grads, alpha=self.ranks)
        else:
            bucket.grads.add_(accumulated, alpha=1 / self.ranks).div_(self.period)
            yield from self.inner(bucket, step)
            yield ALL_RECEIVED
            accumulated.zero_()

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return the mean over a period."""
        return mean_traffic(self.inner.traffic(n, itemsize), self.period)


@dataclass(frozen=True)
class SyncEveryN:
    """Exchange gradients in every `period`-th round; in the others step on this rank's own. Parameters drift apart.

    weight : this rank's part of the total batch
    """

    inner: Exchange
    period: int
    weight: float

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        if (step + 1) % self.period:
            yield from LocalGradient(self.weight)(bucket, step)
        else:
            yield from self.inner(bucket, step)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return the mean over a period."""
        return mean_traffic(self.inner.traffic(n, itemsize), self.period)


@dataclass(frozen=True)
class OptimisticMirrorDescent:
    """Take the gradient at an extrapolated point, and step from the original one (Popov 1980; Liu et al. 2020).

        w_half = w - lr F_prev;  F = gradient at w_half;  w <- w - lr F

    F_prev is the previous gradient. The first round only takes the gradient at the start, which is the first F_prev.

    get_lr : the learning rate of the optimizer, which has to be plain SGD
    """

    get_lr: Callable[[], float]

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        yield TURN_STARTED
        is_first = "previous" not in bucket.states
        original = bucket.workspace("original params", bucket.params.numel()).copy_(bucket.params)
        previous = bucket.state("previous")
        bucket.params.sub_(previous, alpha=self.get_lr())
        try:
            yield GRAD_READY
            yield ALL_RECEIVED
            previous.copy_(bucket.grads)
            if is_first:
                bucket.grads.zero_()
        finally:  # also if the step is aborted
            bucket.params.copy_(original)

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return Traffic()
