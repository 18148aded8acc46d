"""How the images of a score are dealt to ranks, and how what was seen of them comes together.

Images are dealt in blocks, in turn: rank r takes blocks r, r + size, ... A batch then holds the same images
whatever the number of ranks, and so does everything that depends on the batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Waitable(Protocol):
    def wait(self) -> Any: ...


class ReduceGroup(Protocol):
    """What a score needs of a group of ranks. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_reduce_sum(self, x: Tensor) -> Waitable: ...  # over ranks, in place; x contiguous
    def all_gather(self, x: Tensor) -> tuple[Tensor, Waitable]: ...  # [k] -> [size, k]


class CompletedWork:
    def wait(self) -> None: ...


class SingleRank:
    """A group of one."""

    rank, size = 0, 1

    def all_reduce_sum(self, x: Tensor) -> CompletedWork:
        return CompletedWork()

    def all_gather(self, x: Tensor) -> tuple[Tensor, CompletedWork]:
        return x[None], CompletedWork()


SINGLE = SingleRank()


def block_shards(count: int, block_size: int, rank: int, size: int) -> list[range]:
    """The rows of `range(count)` that are a rank's, as ranges of at most `block`."""
    return [range(low, min(low + block_size, count)) for low in range(rank * block_size, count, size * block_size)]


@dataclass(frozen=True)
class FeatureShard:
    """A rank's part of `count` rows that were dealt in blocks."""

    local: Tensor  # [n, F]
    count: int
    block_size: int

    def rows(self, group: ReduceGroup) -> Tensor:
        """[n] int64: which rows these are."""
        mine = [i for part in block_shards(self.count, self.block_size, group.rank, group.size) for i in part]
        return torch.tensor(mine, dtype=torch.long, device=self.local.device)

    def windows(self, group: ReduceGroup, max_rows: int) -> Iterator[tuple[range, Tensor]]:
        """All rows in their order, about `most` at a time: which they are, and [len, F], on every rank.

        Every rank walks through all of them: each window is gathered from its owners.
        """
        blocks = max(1, max_rows // (self.block_size * group.size))  # of each rank
        step = blocks * self.block_size
        for number, low in enumerate(range(0, self.count, step * group.size)):
            there = range(low, min(low + step * group.size, self.count))
            mine = self.local[number * step : (number + 1) * step]
            yield there, _gather_rows(mine, step, self.block_size, group)[: len(there)]


def _gather_rows(local: Tensor, max_rows: int, block_size: int, group: ReduceGroup) -> Tensor:
    """[n, F] of each rank, n at most `most`, in blocks -> [size * most, F]; what is missing is at the end."""
    if group.size == 1:
        return local
    padded = local.new_zeros(max_rows, *local.shape[1:])
    padded[: len(local)] = local
    gathered, work = group.all_gather(padded.flatten())
    work.wait()
    return (
        gathered.view(group.size, max_rows // block_size, block_size, -1).transpose(0, 1).reshape(-1, *local.shape[1:])
    )


def gather_all(shard: FeatureShard, group: ReduceGroup) -> Tensor:
    """All rows, [count, F], on every rank."""
    return torch.cat(
        [shard.local[:0], *(rows for _, rows in shard.windows(group, shard.count + shard.block_size * group.size))]
    )


def broadcast_from_rank0(group: ReduceGroup, x: Tensor) -> Tensor:
    """Rank 0's `x`, the same bits on every rank; written over the others'."""
    if group.rank != 0:
        x.zero_()
    group.all_reduce_sum(x).wait()
    return x


def compute_on_rank0(group: ReduceGroup, compute: Callable[[], list[float]], count: int) -> list[float]:
    """`number` numbers that rank 0 computes and every rank gets."""
    values = compute() if group.rank == 0 else [0.0] * count
    return broadcast_from_rank0(group, torch.tensor(values, dtype=torch.float64)).tolist()


class EvaluationAborted(Exception):
    """All ranks wanted to, before everything was seen."""


def all_ranks(group: ReduceGroup, condition: bool) -> bool:
    """Whether it is so on all ranks."""
    votes = torch.tensor([float(condition)])
    group.all_reduce_sum(votes).wait()
    return int(votes) == group.size
