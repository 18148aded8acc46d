"""The kernel distance (Bińkowski et al. 2018, arXiv 1801.01401), over features that many ranks hold."""

import torch
from torch import Tensor

from paragan.eval.sharding import ALONE, Share, Summing

WINDOW = 8192  # rows that are on every rank at a time


def kid(
    real: Share, fake: Share, *, subsets: int = 100, subset_size: int = 1000, seed: int = 0, group: Summing = ALONE
) -> float:
    """Squared maximum mean discrepancy of real [N, F] and fake [M, F] features, mean over random subsets.

    The kernel is (x.y / F + 1)^3. Being unbiased, it is as often negative as positive for equal
    distributions. Subsets are of at most N and M vectors, and follow from `seed`, drawn as torchmetrics draws
    them. Every rank adds up the pairs of its own rows with all; rows travel in windows.
    """
    size = min(subset_size, real.count, fake.count)
    chosen = _chosen(real.count, fake.count, subsets, size, seed)
    ours, theirs = ([pair[side].to(real.own.device) for pair in chosen] for side in (0, 1))
    xx = _sums(real, real, ours, ours, group)
    yy = _sums(fake, fake, theirs, theirs, group)
    xy = _sums(real, fake, ours, theirs, group)
    sums = torch.stack([xx - _diagonals(real, ours, group), yy - _diagonals(fake, theirs, group), xy])
    group.sum(sums).wait()
    within = (sums[0] + sums[1]) / (size * (size - 1))
    return (within - 2 * sums[2] / size**2).mean().item()


def _chosen(n: int, m: int, subsets: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randperm(k, generator=draw)[:size] for k in (n, m)) for _ in range(subsets)]  # pyright: ignore


def _sums(a: Share, b: Share, of_a: list[Tensor], of_b: list[Tensor], group: Summing) -> Tensor:
    """[subsets] sums of the kernel over pairs of this rank's rows of `a` with all of `b`, of each subset."""
    mine = _own(a, of_a, group)
    sums = a.own.new_zeros(len(of_a), dtype=torch.float64)
    for there, rows in b.windows(group, WINDOW):
        rows = rows.double()
        for number, (x, chosen) in enumerate(zip(mine, of_b, strict=True)):
            here = chosen[(chosen >= there.start) & (chosen < there.stop)] - there.start
            sums[number] += (a.own[x].double() @ rows[here].T / rows.shape[1] + 1).pow(3).sum()
    return sums


def _diagonals(a: Share, chosen: list[Tensor], group: Summing) -> Tensor:
    """[subsets] what this rank's rows are with themselves, which is to be left out."""
    alone = (a.own.double().square().sum(1) / a.own.shape[1] + 1).pow(3)
    return torch.stack([alone[mine].sum() for mine in _own(a, chosen, group)])


def _own(share: Share, chosen: list[Tensor], group: Summing) -> list[Tensor]:
    """Where among its own rows this rank has those of each subset."""
    at = torch.full((share.count,), -1, dtype=torch.long, device=share.own.device)
    rows = share.rows(group)
    at[rows] = torch.arange(len(rows), device=at.device)
    return [(there := at[subset])[there >= 0] for subset in chosen]
