"""Random numbers of lanes as tensors on a device, from the generators of paragan/core/philox.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paragan.core.host_copies import copy_to_device
from paragan.core.philox import philox_generator

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LaneRng:
    """The random numbers of some lanes at one position; every lane has its own streams.

    The first dimension N of what it returns is len(lanes) * per_lane: the images of one lane after the other.
    """

    seed: int
    position: int  # in images
    lanes: tuple[int, ...]
    per_lane: int
    device: torch.device = CPU

    def normal(self, stream: str, *shape: int) -> Tensor:
        """Draw [N, *shape] float32, standard normal."""
        return self._concat_lanes(stream, lambda g: g.standard_normal((self.per_lane, *shape), dtype=np.float32))

    def uniform(self, stream: str, *shape: int) -> Tensor:
        """Draw [N, *shape] float32, uniform in [0, 1)."""
        return self._concat_lanes(stream, lambda g: g.random((self.per_lane, *shape), dtype=np.float32))

    def choice(self, stream: str, values: np.ndarray) -> Tensor:
        """Draw [N] of `values`, each with equal probability."""
        return self._concat_lanes(stream, lambda g: values[g.integers(len(values), size=self.per_lane)])

    def seed_torch(self, stream: str) -> None:
        """Seed torch's own generator (dropout): the same for the same lanes in one pass."""
        rng = philox_generator(self.seed, f"torch/{stream}", self.lanes[0], self.position)
        torch.manual_seed(int(rng.integers(2**63)))

    def _concat_lanes(self, stream: str, sample) -> Tensor:
        parts = [sample(philox_generator(self.seed, stream, lane, at)) for lane, at in zip(self.lanes, self._positions)]
        return copy_to_device(torch.from_numpy(np.concatenate(parts)), self.device)

    @property
    def _positions(self) -> Sequence[int]:
        """The position of each lane."""
        return [self.position] * len(self.lanes)


@dataclass(frozen=True)
class SampleRng(LaneRng):
    """The random numbers of samples: each is the only image of lane 0 at its own position, its index.

    So the numbers of a sample do not depend on the other samples of the batch. `of` makes one.
    """

    indices: tuple[int, ...] = ()

    @staticmethod
    def of(seed: int, indices: Sequence[int]) -> SampleRng:
        """Return the random numbers of the samples `indices` [N]."""
        return SampleRng(seed, indices[0], (0,) * len(indices), 1, indices=tuple(indices))

    @property
    def _positions(self) -> Sequence[int]:
        return self.indices
