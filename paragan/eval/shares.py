"""How the images of a score are dealt to ranks, and how what was seen of them comes together.

Images are dealt in blocks, in turn: rank r takes blocks r, r + size, ... A batch then holds the same images
whatever the number of ranks, and so does everything that depends on the batch.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class Work(Protocol):
    def wait(self) -> Any: ...


class Summing(Protocol):
    """What a score needs of a group of ranks. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def sum(self, x: Tensor) -> Work: ...  # over ranks, in place; x contiguous
    def gather(self, x: Tensor) -> tuple[Tensor, Work]: ...  # [k] -> [size, k]


class Done:
    def wait(self) -> None: ...


class Alone:
    """A group of one."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Done:
        return Done()

    def gather(self, x: Tensor) -> tuple[Tensor, Done]:
        return x[None], Done()


ALONE = Alone()


def dealt(count: int, block: int, rank: int, size: int) -> list[range]:
    """The rows of `range(count)` that are a rank's, as ranges of at most `block`."""
    return [range(low, min(low + block, count)) for low in range(rank * block, count, size * block)]


def whole(own: Tensor, count: int, block: int, group: Summing) -> Tensor:
    """Rows as dealt, [n, F] on each rank -> all of them in their order, [count, F] on every rank."""
    rows = [[i for part in dealt(count, block, rank, group.size) for i in part] for rank in range(group.size)]
    padded = own.new_zeros(len(rows[0]), own.shape[1])  # rank 0 never has fewer than another
    padded[: len(own)] = own
    gathered, work = group.gather(padded.flatten())
    work.wait()
    result = own.new_empty(count, own.shape[1])
    for mine, part in zip(rows, gathered.view(group.size, *padded.shape), strict=True):
        result[mine] = part[: len(mine)]
    return result


def of_first(group: Summing, x: Tensor) -> Tensor:
    """Rank 0's `x`, the same bits on every rank; written over the others'."""
    if group.rank != 0:
        x.zero_()
    group.sum(x).wait()
    return x


def agreed(group: Summing, compute: Callable[[], float], device: torch.device) -> float:
    """A number that rank 0 computes and every rank gets."""
    value = compute() if group.rank == 0 else 0.0
    return of_first(group, torch.tensor([value], dtype=torch.float64, device=device)).item()
