"""Random numbers and samples as functions of a position, for training loops of the user that resume exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler

from paragan.api.joined_world import join
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.philox import epoch_permutation, philox_generator


def rng(
    position: int, *, seed: int = 0, lane: int | None = None, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return a generator whose numbers are a function of (seed, lane, position).

        z = torch.randn(8, 128, generator=paragan.rng(step))

    A checkpoint then has no generator to save, and one process can draw what each of several ranks draws.

    Args:
        position: such as the step, or how many samples came before; 0 or more.
        seed: of the run.
        lane: which stream of numbers; None: the number of this rank.
        device: of the numbers.

    Raises:
        UsageError: a number is negative.
    """
    lane = join().rank if lane is None else lane
    for name, value in (("position", position), ("seed", seed), ("lane", lane)):
        _check_count(name, value)
    generator = torch.Generator(device)
    generator.manual_seed(int(philox_generator(seed, "torch/rng", lane, position).integers(2**63)))
    return generator


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise UsageError(f"{name}={value}: must be a whole number, not negative. Use 0 or more")


def shard(
    dataset: Sized, *, seed: int = 0, shuffle: bool = True, position: int = 0, world: World | None = None
) -> ShardSampler:
    """Return a sampler of this rank's part of a data set, for `DataLoader(dataset, batch_size, sampler=...)`.

    Args:
        dataset: its length counts.
        seed: of the order of each epoch.
        shuffle: whether each epoch has an order of its own; otherwise all have that of the data set.
        position: where the first iteration begins, as samples that all ranks together have used since the start.
        world: of `paragan.join()`; None: the world that it returns.

    Raises:
        UsageError: there are fewer samples than ranks, or the position is negative.
    """
    if not isinstance(dataset, Sized):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"dataset: {type(dataset).__name__} has no length. Use a data set that can be indexed")
    _check_count("seed", seed)
    return ShardSampler(len(dataset), world or join(), seed, shuffle, position)


class ShardSampler(Sampler[int]):
    """The samples of one rank: each iteration is an epoch, or what is left of it.

    n ranks with batches of b use the samples that one rank uses with batches of n b. All ranks get equally many: of an
    epoch up to `size - 1` samples are left out, others in each.

    position : where the next iteration begins: how many samples all ranks together have used since the start. It rises
               by an epoch when one has been iterated to its end. Set it when a run is resumed: loaders read ahead, so
               count what the loop has used.
    """

    def __init__(self, num_samples: int, world: World, seed: int, shuffle: bool, position: int):
        if num_samples < world.size:
            raise UsageError(
                f"dataset: has {num_samples} samples for {world.size} ranks. Use more data, or fewer ranks"
            )
        self.num_samples, self.seed, self.shuffle = num_samples, seed, shuffle
        self._rank, self._size = world.rank, world.size
        self.position = position

    @property
    def position(self) -> int:
        return self._position

    @position.setter
    def position(self, position: int) -> None:
        _check_count("position", position)
        self._position = position

    @property
    def epoch_samples(self) -> int:
        """Samples that all ranks together use in an epoch."""
        return self.num_samples - self.num_samples % self._size

    def __len__(self) -> int:
        """Return how many samples the next iteration yields."""
        return (self.epoch_samples - self.position % self.epoch_samples) // self._size

    def __iter__(self) -> Iterator[int]:
        epoch, offset = divmod(self.position, self.epoch_samples)
        order = epoch_permutation(self.seed, epoch, self.num_samples) if self.shuffle else range(self.num_samples)
        for remaining in range(len(self), 0, -1):
            if remaining == 1:  # a loop that counts its batches asks for no sample beyond the last
                self.position = (epoch + 1) * self.epoch_samples
            yield int(order[offset + self._rank])
            offset += self._size
