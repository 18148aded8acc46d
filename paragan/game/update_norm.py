"""The size of a player's updates, measured on a sample of its weights."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
from torch import Tensor

SAMPLE_SIZE = 1024  # weights of a player


def strided_sample(params: Tensor) -> Tensor:
    """Return equally spaced elements of [P], as a view."""
    return params[:: -(-len(params) // SAMPLE_SIZE)]


class UpdateNorm:
    """The largest update since the last `pop_max`, relative to the norm of the weights before it (0 if they were 0)."""

    def __init__(self, params: Tensor):
        self._weights = strided_sample(params)
        self._before = self._weights.clone()
        self._max = torch.zeros((), device=params.device)

    @contextlib.contextmanager
    def measuring_step(self) -> Generator[None]:
        """Measure the optimizer step that is taken inside."""
        self._before.copy_(self._weights)
        yield
        norm = self._before.float().square().sum().sqrt()
        update = (self._weights - self._before).float().square().sum().sqrt()
        torch.maximum(self._max, torch.where(norm > 0, update / norm, 0.0), out=self._max)

    def pop_max(self) -> Tensor:
        """Return the largest update ([] float64) and start again."""
        largest = self._max.double()
        self._max.zero_()
        return largest
