"""TODO: docstring of paragan/comm/bucket.py"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Generator
from typing import Protocol

import torch
from torch import Tensor

from paragan.comm.process_group import Work
from paragan.comm.traffic import Traffic


class ExchangeEvent(enum.Enum):
    """What an exchange may wait for besides work."""

    TURN_STARTED = "the player's turn begins"
    GRAD_READY = "this bucket's gradient is complete"
    ALL_RECEIVED = "backward is over, all messages of the beat are here, and nobody refused it: the step will be taken"


TURN_STARTED, GRAD_READY, ALL_RECEIVED = (
    ExchangeEvent.TURN_STARTED,
    ExchangeEvent.GRAD_READY,
    ExchangeEvent.ALL_RECEIVED,
)


class Bucket:
    """A slice of one player's vectors: the unit every exchange works on.

    params, grads : [n] views into the player's vectors; writing here writes the network.
    memory(name)  : [n] vector that survives the step and is checkpointed (zero at first).
    scratch(name) : a vector that does not: the same storage at every step, since fresh pages cost more than
                    what is written to them.
    names         : what lies where, (first number, the parameter's name), in rising order.
    """

    def __init__(self, params: Tensor, grads: Tensor, index: int, names: list[tuple[int, str]]):
        self.params, self.grads, self.index, self.names = params, grads, index, names
        self.states: dict[str, Tensor] = {}
        self._workspaces: dict[str, Tensor] = {}

    def state(self, name: str) -> Tensor:
        if name not in self.states:
            self.states[name] = torch.zeros_like(self.grads)
        return self.states[name]

    def workspace(self, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[*shape], as it was left, zeros at first."""
        if name not in self._workspaces or self._workspaces[name].shape != shape:
            self._workspaces[name] = torch.zeros(shape, dtype=dtype, device=self.grads.device)
        return self._workspaces[name]

    def parameter_at(self, position: int) -> str:
        """The name of the parameter that a number of this bucket belongs to."""
        return self.names[bisect.bisect_right(self.names, position, key=lambda entry: entry[0]) - 1][1]


class Exchange(Protocol):
    """How one player's replicas agree."""

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]: ...

    def traffic(self, n: int) -> Traffic:
        """What one rank sends for a bucket of n numbers, in one step."""
        ...
