"""Random numbers as a function of position, so a checkpoint has no generator state to save.

Philox is a counter-based generator: (key, counter) -> numbers (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011). The key is (seed, stream), the counter (lane, position), so the numbers of a lane depend neither on
the rank that owns it nor on the numbers drawn before. Names of streams are part of the results: never rename one.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np


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
