"""Random numbers as a function of position, so a checkpoint has no generator state to save.

Philox is a counter-based generator: (key, counter) -> numbers (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). The key is (seed, stream), the counter (lane, position), so the numbers of a lane depend neither on
the rank that owns it nor on the numbers drawn before. Names of streams are part of the results: never rename one.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from paragan.core.host_copies import copy_to_device

CPU = torch.device("cpu")


def philox_generator(seed: int, stream: str, lane: int = 0, position: int = 0, row: int = 0) -> np.random.Generator:
    """Return the generator of `stream` for one lane at one position (in images) of the run with this seed.

    Streams that rows draw from one by one have a generator for each `row` of the lane.
    """
    key = np.array([seed, zlib.crc32(stream.encode())], dtype=np.uint64)
    counter = np.array([0, lane, position, row], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


@lru_cache(maxsize=4)
def epoch_permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the order [size] in which one epoch visits the data."""
    return philox_generator(seed, "data order", position=epoch).permutation(size)


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
