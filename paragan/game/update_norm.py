"""How long a player's steps are, on some of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

SAMPLE_SIZE = 1024  # weights of a player that are looked at


def strided_sample(params: Tensor) -> Tensor:
    """Some of [P], equally far apart; a view."""
    return params[:: -(-len(params) // SAMPLE_SIZE)]


class UpdateNorm:
    """The longest step of the optimizer since somebody asked, relative to the norm of the weights before it (0 where
    all of them were 0)."""

    def __init__(self, params: Tensor):
        self._weights = strided_sample(params)
        self._before = self._weights.clone()
        self._max = params.new_zeros(())

    @contextlib.contextmanager
    def measuring_step(self) -> Generator[None]:
        """Inside, a step is taken."""
        self._before.copy_(self._weights)
        yield
        norm, went = (x.square().sum().sqrt() for x in (self._before, self._weights - self._before))
        torch.maximum(self._max, torch.where(norm > 0, went / norm, 0.0), out=self._max)

    def pop_max(self) -> Tensor:
        """[] float64: the longest, which is then forgotten."""
        longest = self._max.double()
        self._max.zero_()
        return longest
