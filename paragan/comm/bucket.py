"""The bucket, the unit of every exchange, and the protocol of an exchange.

An exchange is a generator over a bucket: how the replicas of one player agree. It yields what it waits for: an
`ExchangeEvent`, or work in flight. comm/flat_params.py runs the generators; comm/exchange.py, gossip.py,
compressed_allreduce.py, reduce_scatter.py and async_gossip.py hold the exchanges.
"""

from __future__ import annotations

import bisect
import copy
import enum
from collections.abc import Generator, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from paragan.comm.process_group import Work
from paragan.comm.traffic import Traffic


class ExchangeEvent(enum.Enum):
    """What an exchange can wait for besides work in flight."""

    TURN_STARTED = "the player's turn begins"
    GRAD_READY = "backward has completed this bucket's gradient"
    ALL_RECEIVED = "backward is over, all messages have arrived and no rank refused the step: it will be applied"


TURN_STARTED = ExchangeEvent.TURN_STARTED
GRAD_READY = ExchangeEvent.GRAD_READY
ALL_RECEIVED = ExchangeEvent.ALL_RECEIVED


class Bucket:
    """A slice of one player's flat vectors: the unit of every exchange.

    params, grads : [n] views into the player's vectors; writing to them changes the network
    index         : the bucket's number within the player
    names         : (offset, parameter name) of every parameter in it, in ascending order of offset
    padding       : the parts between and after parameters, which belong to none
    fragment      : the number of the fragment of the player that it belongs to
    states        : the vectors of `state` by name
    """

    def __init__(
        self,
        params: Tensor,
        grads: Tensor,
        index: int,
        names: list[tuple[int, str]],
        padding: Sequence[slice] = (),
        fragment: int = 0,
    ):
        self.params, self.grads, self.index, self.names = params, grads, index, names
        self.padding = padding
        self.fragment = fragment
        self.states: dict[str, Tensor] = {}
        self._workspaces: dict[str, Tensor] = {}

    def state(self, name: str) -> Tensor:
        """Return a vector [n] that persists between steps and is checkpointed; zeros at first."""
        if name not in self.states:
            self.states[name] = torch.zeros_like(self.grads)
        return self.states[name]

    def workspace(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return a tensor [*shape] that is not checkpointed, with its former contents; zeros at first.

        It has the same storage at every step, because allocating new pages costs more than filling them.

        Args:
            dtype: by default that of the parameters, so that it can hold what replicas send to each other.
        """
        if name not in self._workspaces or self._workspaces[name].shape != shape:
            dtype = dtype or self.params.dtype
            self._workspaces[name] = torch.zeros(shape, dtype=dtype, device=self.grads.device)
        return self._workspaces[name]

    def with_grads(self, grads: Tensor) -> Self:
        """Return this bucket with another vector [n] in place of its gradients; states and workspaces are shared."""
        other = copy.copy(self)
        other.grads = grads
        return other

    def zero_padding(self, x: Tensor) -> None:
        """Set x [n] to 0 where no parameter is."""
        for part in self.padding:
            x[part].zero_()

    def parameter_at(self, position: int) -> str:
        """Return the name of the parameter that holds element `position` of this bucket."""
        return self.names[bisect.bisect_right(self.names, position, key=lambda entry: entry[0]) - 1][1]


class Exchange(Protocol):
    """How the replicas of one player agree."""

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        """Exchange one bucket in one step; yield what to wait for."""
        ...

    def traffic(self, n: int, itemsize: int) -> Traffic:
        """Return what one rank sends for a bucket of n numbers of `itemsize` bytes, in one step."""
        ...
