"""How long a player's steps are, on some of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

SAMPLE = 1024  # weights of a player that are looked at


def sampled(params: Tensor) -> Tensor:
    """Some of [P], equally far apart; a view."""
    return params[:: -(-len(params) // SAMPLE)]


class Stride:
    """The longest step of the optimizer since somebody asked, relative to the norm of the weights before it (0 where
    all of them were 0)."""

    def __init__(self, params: Tensor):
        self._weights = sampled(params)
        self._before = self._weights.clone()
        self._longest = params.new_zeros(())

    @contextlib.contextmanager
    def measured(self) -> Generator[None]:
        """Inside, a step is taken."""
        self._before.copy_(self._weights)
        yield
        norm, went = (x.square().sum().sqrt() for x in (self._before, self._weights - self._before))
        torch.maximum(self._longest, torch.where(norm > 0, went / norm, 0.0), out=self._longest)

    def take(self) -> Tensor:
        """[] float64: the longest, which is then forgotten."""
        longest = self._longest.double()
        self._longest.zero_()
        return longest
