"""Exchanges: how the replicas of one player agree, written as generators over a bucket.

A generator starts before the forward pass. `yield GRADIENT` waits until backward has filled the bucket,
`yield BACKWARD` until all gradients of the beat are there; yielding work waits until it has arrived, which
is looked at after backward. The optimizer steps when every generator has ended. What must outlive a step
is a `bucket.memory(name)`, and is checkpointed as a matter of course.

A rank's gradient is its *share*: the sum over its lanes divided by all lanes of the team. The team's
gradient is therefore a sum, whatever the lanes each rank owns, and never a mean of rank means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from .flat import GRADIENT, Bucket, Moment
from .meter import Traffic, ring_all_reduce
from .world import Group, Work


class Exchange(Protocol):
    """How one player's replicas agree."""

    def __call__(self, bucket: Bucket, step: int) -> Iterator[Work | Moment]: ...

    def traffic(self, n: int) -> Traffic:
        """What one rank sends for a bucket of n numbers, in one step."""
        ...


@dataclass(frozen=True)
class Local:
    """No one to agree with."""

    def __call__(self, bucket: Bucket, step: int) -> Iterator[Work | Moment]:
        yield from ()

    def traffic(self, n: int) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class AllReduce:
    """Every rank gets the sum of the group's shares: the gradient of the total batch."""

    group: Group

    def __call__(self, bucket: Bucket, step: int) -> Iterator[Work | Moment]:
        yield GRADIENT  # until backward has filled this bucket
        yield self.group.sum(bucket.grads)  # travels while backward goes on elsewhere

    def traffic(self, n: int) -> Traffic:
        return ring_all_reduce(4 * n, self.group.size)
