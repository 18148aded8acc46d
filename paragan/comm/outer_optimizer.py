"""The outer optimizer: ranks train by themselves for a period, then one optimizer steps on what they have changed.

    Delta  = sum over ranks of weight (anchor - params)        the outer gradient: the weighted mean over ranks
    m      <- momentum m + Delta
    anchor <- anchor - lr (Delta + momentum m)                 Nesterov, as in torch.optim.SGD
    params <- anchor

With lr 1 and no momentum the anchor is the mean of the parameters: local SGD (Stich 2019; for games, local SGDA: Deng
and Mahdavi 2021). With Nesterov momentum this is DiLoCo (Douillard et al. 2023, arXiv 2311.08105). Delta is exchanged
like a gradient, so it can be compressed; over a sparse wire, with error feedback that decays in place of momentum, this
is SparseLoCo (arXiv 2508.15706).

In Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) each fragment of a player is synchronised in a round of
its own. With a delay, messages travel while ranks train on, and what ranks have learned since is kept (also CoCoD-SGD,
Shen et al. 2019, arXiv 1906.12043):

    params <- params + (anchor - params as they were when sent)
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from paragan.comm.bucket import ALL_RECEIVED, Bucket, Exchange, ExchangeEvent
from paragan.comm.exchange import LocalGradient
from paragan.comm.process_group import Work
from paragan.comm.traffic import Traffic, mean_traffic
from paragan.core.schema import config_class, name_shorthand


@config_class
class OuterMean:
    """The mean of the parameters: a step with lr 1 and no momentum."""

    name: Literal["mean"] = "mean"
    lr: ClassVar[float] = 1.0
    momentum: ClassVar[float] = 0.0


@config_class
class OuterNesterov:
    """Gradient descent with Nesterov momentum on what ranks have changed in a period (DiLoCo).

    lr       : the step size; 1 goes to the mean
    momentum : the share of the former steps that is kept
    """

    name: Literal["nesterov"] = "nesterov"
    lr: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.7
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9


AnyOuter = Annotated[OuterMean | OuterNesterov, Field(discriminator="name"), name_shorthand]


@dataclass(frozen=True)
class OuterSteps:
    """The steps of one player's outer optimizer, and the rounds in which they are taken.

    period       : rounds between two steps of a fragment
    lr, momentum : as in `OuterNesterov`
    fragments    : parts of the player that are sent in rounds of their own; 1: both players are sent at once
    delay        : rounds from sending to applying
    player       : its number: those of even and odd number take turns
    """

    period: int
    lr: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    delay: int = 0
    player: int = 0

    @property
    def is_mean(self) -> bool:
        """Return whether a step ends at the mean of the parameters, so that it changes nothing on one rank."""
        return self.lr == 1 and not self.momentum

    def phase(self, fragment: int) -> int:
        """Return the round of a period in which a fragment is sent. The fragments of two players fill it evenly."""
        if self.fragments == 1:
            return 0  # nobody trains against an opponent that is not averaged yet
        return (2 * fragment + self.player % 2) * self.period // (2 * self.fragments)

    def rounds_since_sent(self, fragment: int, step: int) -> int:
        """Return how many rounds ago a fragment was due to be sent; 0: it is now."""
        return (step - self.phase(fragment)) % self.period


class Transfer:
    """An outer gradient on its way. Its messages are waited for in fixed rounds, so that all ranks send in one order.

    exchange : the generator that sends it
    delay    : rounds until it has arrived
    hops     : how many messages follow each other; they share the rounds evenly
    """

    def __init__(self, exchange: Generator[Work | ExchangeEvent], delay: int, hops: int):
        self._exchange, self._delay, self._hops = exchange, delay, hops
        self._num_received = 0
        self._awaited: Work | None = None
        self._send_next()

    def advance(self, rounds: int) -> None:
        """Wait for the messages that are due so many rounds after the first was sent, and send what follows them."""
        while self._awaited is not None and self._due_after <= rounds:
            self._awaited.wait()
            self._num_received += 1
            self._send_next()

    @property
    def _due_after(self) -> int:
        """The rounds after which the next message is waited for."""
        return math.ceil(self._delay * min(self._num_received + 1, self._hops) / self._hops)

    def _send_next(self) -> None:
        """Continue the exchange until it waits for a message; None: it has ended."""
        for awaited in self._exchange:
            if not isinstance(awaited, ExchangeEvent):  # there is no backward pass to wait for
                self._awaited = awaited
                return
        self._awaited = None

    def close(self) -> None:
        """End the exchange: what has arrived is not used."""
        self._exchange.close()
        self._awaited = None


@dataclass(frozen=True)
class OuterOptimizer:
    """Step on this rank's own gradient, and take an outer step after every period.

    A fragment is sent, and a step applied, when a round starts, before any turn. States of a bucket: "anchor" (where
    the last step ended), "momentum" (equal on all ranks), and between sending and applying "sent" (the parameters then)
    and "outer_gradient". A checkpoint holds the latter after `drain` has received it; on another number of ranks "sent"
    becomes its mean, so that the mean of the parameters goes on as before.

    weight    : this rank's part of the total batch, and so of the mean
    hops      : how many messages of `inner` follow each other
    transfers : by bucket; None: nothing of it is in flight
    """

    inner: Exchange
    weight: float
    steps: OuterSteps
    hops: int = 1
    transfers: dict[Bucket, Transfer | None] = field(default_factory=dict, repr=False, compare=False)  # pyright: ignore

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        if "anchor" not in bucket.states:
            bucket.state("anchor").copy_(bucket.params)
        if bucket not in self.transfers:
            self.transfers[bucket] = None
            _drop_empty(bucket)
        try:
            self._communicate(bucket, step)
            yield from LocalGradient(self.weight)(bucket, step)
            yield ALL_RECEIVED
        except BaseException:  # the step is aborted
            self._drop_transfer(bucket)
            raise

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return the mean over a period."""
        return mean_traffic(self.inner.traffic(n, itemsize), self.steps.period)

    def drain(self) -> None:
        """Receive all that is in flight. All ranks call this between rounds; what arrives is applied in its round."""
        for bucket, transfer in self.transfers.items():
            if transfer:
                transfer.advance(self.steps.delay)
                self.transfers[bucket] = None

    def _communicate(self, bucket: Bucket, step: int) -> None:
        """Send and apply what is due when this round starts."""
        rounds = self.steps.rounds_since_sent(bucket.fragment, step)
        if rounds == 0:
            if "sent" in bucket.states:  # a checkpoint of another period
                self._apply(bucket)
            self._send(bucket, step)
        transfer = self.transfers[bucket]
        if transfer:
            transfer.advance(rounds)
        if rounds >= self.steps.delay and (transfer or "sent" in bucket.states):
            self.transfers[bucket] = None
            self._apply(bucket)

    def _send(self, bucket: Bucket, step: int) -> None:
        """Start to sum the outer gradient over ranks."""
        if self.steps.delay:
            n = len(bucket.params)
            bucket.states["sent"] = bucket.workspace("sent", n).copy_(bucket.params)
            bucket.states["outer_gradient"] = bucket.workspace("outer_gradient", n)
        sending = bucket.with_grads(self._gradient(bucket))
        torch.sub(bucket.state("anchor"), bucket.params, out=sending.grads).mul_(self.weight)
        self.transfers[bucket] = Transfer(self.inner(sending, step), self.steps.delay, self.hops)

    def _apply(self, bucket: Bucket) -> None:
        """Take the outer step, and continue from where it ends."""
        gradient = self._gradient(bucket)
        anchor = bucket.state("anchor")
        if self.steps.momentum:
            momentum = bucket.state("momentum").mul_(self.steps.momentum).add_(gradient)
            gradient.add_(momentum, alpha=self.steps.momentum)
        anchor.sub_(gradient, alpha=self.steps.lr)
        gradient.zero_()
        if "sent" in bucket.states:
            bucket.params.add_(torch.sub(anchor, bucket.states["sent"], out=gradient))
            _drop_sent(bucket)
        else:
            bucket.params.copy_(anchor)

    def _gradient(self, bucket: Bucket) -> Tensor:
        """Return the vector of the outer gradient [n]: that of the gradients is free until the turn begins."""
        return bucket.states.get("outer_gradient", bucket.grads)

    def _drop_transfer(self, bucket: Bucket) -> None:
        """Drop what is in flight. The next outer gradient has it too, since the anchor was not moved."""
        transfer = self.transfers[bucket]
        if transfer:
            transfer.close()
        self.transfers[bucket] = None
        _drop_sent(bucket)


def _drop_sent(bucket: Bucket) -> None:
    for name in ("sent", "outer_gradient"):
        bucket.states.pop(name, None)


def _drop_empty(bucket: Bucket) -> None:
    """Drop the zeros that a checkpoint has for a bucket of which nothing was in flight, as of other buckets."""
    if "sent" in bucket.states and not bucket.states["sent"].any():
        _drop_sent(bucket)


def for_later_turns(exchange: Exchange) -> Exchange:
    """Return the exchange of a player's further turns in a round: outer steps are taken in the first one only."""
    return LocalGradient(exchange.weight) if isinstance(exchange, OuterOptimizer) else exchange
