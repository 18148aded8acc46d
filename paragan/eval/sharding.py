"""How the images of an evaluation are distributed over ranks, and how results are combined.

Blocks of images go to ranks in turn: rank r gets blocks r, r + size, ... So a batch holds the same images for any
number of ranks, and results do not depend on it. Features stay on their rank; `FeatureShard.windows` yields all rows
in order, a window at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.core.host_copies import copy_to_device


class Waitable(Protocol):
    """A running operation."""

    def wait(self) -> Any:
        """Block until the operation is done."""
        ...


class ReduceGroup(Protocol):
    """The part of a process group that evaluation needs. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_reduce_sum(self, x: Tensor) -> Waitable:
        """Sum x over ranks, in place; x must be contiguous."""
        ...

    def all_gather(self, x: Tensor) -> tuple[Tensor, Waitable]:
        """Gather x [k] of all ranks into [size, k]."""
        ...


class CompletedWork:
    """Work that is done already."""

    def wait(self) -> None:
        """Return at once."""


class SingleRank:
    """A group of one rank."""

    rank = 0
    size = 1

    def all_reduce_sum(self, x: Tensor) -> CompletedWork:
        """Leave x as it is."""
        return CompletedWork()

    def all_gather(self, x: Tensor) -> tuple[Tensor, CompletedWork]:
        """Return x [k] as [1, k]."""
        return x[None], CompletedWork()


SINGLE = SingleRank()


def block_shards(count: int, block_size: int, rank: int, size: int) -> list[range]:
    """Return the blocks of a rank: ranges of at most `block_size` rows of `range(count)`."""
    starts = range(rank * block_size, count, size * block_size)
    return [range(start, min(start + block_size, count)) for start in starts]


@dataclass(frozen=True)
class FeatureShard:
    """A rank's part of `count` rows that are distributed in blocks."""

    local: Tensor  # [n, F]
    count: int
    block_size: int

    def host_rows(self, group: ReduceGroup) -> Tensor:
        """Return the indices of this rank's rows, int64 [n] on the host."""
        blocks = block_shards(self.count, self.block_size, group.rank, group.size)
        return torch.tensor([i for block in blocks for i in block], dtype=torch.long)

    def rows(self, group: ReduceGroup) -> Tensor:
        """Return the indices of this rank's rows, int64 [n] where the rows are."""
        return copy_to_device(self.host_rows(group), self.local.device)

    def windows(self, group: ReduceGroup, max_rows: int) -> Iterator[tuple[range, Tensor]]:
        """Yield all rows in order, about `max_rows` at a time, on every rank: (their indices, rows [len, F]).

        Each window is gathered from all ranks, so every rank must consume all windows.
        """
        blocks = max(1, max_rows // (self.block_size * group.size))  # of each rank
        step = blocks * self.block_size
        for i, start in enumerate(range(0, self.count, step * group.size)):
            window = range(start, min(start + step * group.size, self.count))
            local = self.local[i * step : (i + 1) * step]
            yield window, _gather_rows(local, step, self.block_size, group)[: len(window)]


def _gather_rows(local: Tensor, max_rows: int, block_size: int, group: ReduceGroup) -> Tensor:
    """Gather up to `max_rows` rows [n, F] of each rank, in blocks, into [size * max_rows, F]; padding is at the end."""
    if group.size == 1:
        return local
    padded = local.new_zeros(max_rows, *local.shape[1:])
    padded[: len(local)] = local
    gathered, work = group.all_gather(padded.flatten())
    work.wait()
    blocks = gathered.view(group.size, max_rows // block_size, block_size, -1)
    return blocks.transpose(0, 1).reshape(-1, *local.shape[1:])


def gather_all(shard: FeatureShard, group: ReduceGroup) -> Tensor:
    """Return all rows, [count, F], on every rank."""
    windows = shard.windows(group, shard.count + shard.block_size * group.size)
    return torch.cat([shard.local[:0], *(rows for _, rows in windows)])


def broadcast_from_rank0(group: ReduceGroup, x: Tensor) -> Tensor:
    """Copy rank 0's `x` bit for bit into the `x` of all ranks, and return it."""
    if group.rank != 0:
        x.zero_()
    group.all_reduce_sum(x).wait()
    return x


class MetricFailed(Exception):
    """Raised on all ranks if a metric cannot be computed; rank 0 has the reason."""


def compute_on_rank0(group: ReduceGroup, compute: Callable[[], list[float]], count: int) -> list[float]:
    """Run `compute` on rank 0 and return its `count` numbers on every rank.

    Raises:
        MetricFailed: on all ranks, if it fails.
    """
    values = [0.0] * count
    reason = "it failed on rank 0"
    has_failed = False
    if group.rank == 0:
        try:
            values = compute()
        except Exception as error:  # the other ranks wait for the numbers
            reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            has_failed = True
    row = torch.tensor([float(has_failed), *values], dtype=torch.float64)
    failed, *result = broadcast_from_rank0(group, row).tolist()
    if failed:
        raise MetricFailed(reason)
    return result


class EvaluationAborted(Exception):
    """Raised if all ranks vote to abort an evaluation."""


def all_ranks(group: ReduceGroup, condition: bool) -> bool:
    """Return whether `condition` is true on all ranks."""
    return sum_over_ranks(group, float(condition)) == group.size


def sum_over_ranks(group: ReduceGroup, value: float) -> float:
    """Return the sum of a number of the host over ranks. No device is waited for."""
    total = torch.tensor([value], dtype=torch.float64)
    group.all_reduce_sum(total).wait()
    return float(total)
