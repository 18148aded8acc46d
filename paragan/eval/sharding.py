"""How the images of a score are dealt to ranks, and how what was seen of them comes together.

Images are dealt in blocks, in turn: rank r takes blocks r, r + size, ... A batch then holds the same images
whatever the number of ranks, and so does everything that depends on the batch.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Share:
    """A rank's part of `count` rows that were dealt in blocks."""

    own: Tensor  # [n, F]
    count: int
    block: int

    def rows(self, group: Summing) -> Tensor:
        """[n] int64: which rows these are."""
        mine = [i for part in dealt(self.count, self.block, group.rank, group.size) for i in part]
        return torch.tensor(mine, dtype=torch.long, device=self.own.device)

    def windows(self, group: Summing, most: int) -> Iterator[tuple[range, Tensor]]:
        """All rows in their order, about `most` at a time: which they are, and [len, F], on every rank.

        Every rank walks through all of them: each window is gathered from its owners.
        """
        blocks = max(1, most // (self.block * group.size))  # of each rank
        step = blocks * self.block
        for number, low in enumerate(range(0, self.count, step * group.size)):
            there = range(low, min(low + step * group.size, self.count))
            mine = self.own[number * step : (number + 1) * step]
            yield there, _in_order(mine, step, self.block, group)[: len(there)]


def _in_order(mine: Tensor, most: int, block: int, group: Summing) -> Tensor:
    """[n, F] of each rank, n at most `most`, in blocks -> [size * most, F]; what is missing is at the end."""
    if group.size == 1:
        return mine
    padded = mine.new_zeros(most, *mine.shape[1:])
    padded[: len(mine)] = mine
    gathered, work = group.gather(padded.flatten())
    work.wait()
    return gathered.view(group.size, most // block, block, -1).transpose(0, 1).reshape(-1, *mine.shape[1:])


def whole(share: Share, group: Summing) -> Tensor:
    """All rows, [count, F], on every rank."""
    return torch.cat(
        [share.own[:0], *(rows for _, rows in share.windows(group, share.count + share.block * group.size))]
    )


def of_first(group: Summing, x: Tensor) -> Tensor:
    """Rank 0's `x`, the same bits on every rank; written over the others'."""
    if group.rank != 0:
        x.zero_()
    group.sum(x).wait()
    return x


def agreed(group: Summing, compute: Callable[[], list[float]], number: int) -> list[float]:
    """`number` numbers that rank 0 computes and every rank gets."""
    values = compute() if group.rank == 0 else [0.0] * number
    return of_first(group, torch.tensor(values, dtype=torch.float64)).tolist()


class GivenUp(Exception):
    """All ranks wanted to, before everything was seen."""


def everywhere(group: Summing, here: bool) -> bool:
    """Whether it is so on all ranks."""
    votes = torch.tensor([float(here)])
    group.sum(votes).wait()
    return int(votes) == group.size
