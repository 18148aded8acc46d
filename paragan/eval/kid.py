"""The kernel distance (Bińkowski et al. 2018, arXiv 1801.01401), over features that many ranks hold."""

import torch
from torch import Tensor

from paragan.eval.sharding import SINGLE, FeatureShard, ReduceGroup

WINDOW_ROWS = 8192  # rows that are on every rank at a time


def kid(
    real: FeatureShard,
    fake: FeatureShard,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
    group: ReduceGroup = SINGLE,
) -> float:
    """Squared maximum mean discrepancy of real [N, F] and fake [M, F] features, mean over random subsets.

    The kernel is (x.y / F + 1)^3. Being unbiased, it is as often negative as positive for equal
    distributions. Subsets are of at most N and M vectors, and follow from `seed`, drawn as torchmetrics draws
    them. Every rank adds up the pairs of its own rows with all; rows travel in windows.
    """
    size = min(subset_size, real.count, fake.count)
    chosen = _draw_subsets(real.count, fake.count, subsets, size, seed)
    ours, theirs = ([pair[side].to(real.local.device) for pair in chosen] for side in (0, 1))
    xx = _kernel_sums(real, real, ours, ours, group)
    yy = _kernel_sums(fake, fake, theirs, theirs, group)
    xy = _kernel_sums(real, fake, ours, theirs, group)
    sums = torch.stack([xx - _diagonal_sums(real, ours, group), yy - _diagonal_sums(fake, theirs, group), xy])
    group.all_reduce_sum(sums).wait()
    within = (sums[0] + sums[1]) / (size * (size - 1))
    return (within - 2 * sums[2] / size**2).mean().item()


def _draw_subsets(n: int, m: int, subsets: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    return [tuple(torch.randperm(k, generator=draw)[:size] for k in (n, m)) for _ in range(subsets)]  # pyright: ignore


def _kernel_sums(
    a: FeatureShard, b: FeatureShard, subsets_a: list[Tensor], subsets_b: list[Tensor], group: ReduceGroup
) -> Tensor:
    """[subsets] sums of the kernel over pairs of this rank's rows of `a` with all of `b`, of each subset."""
    mine = _local_rows(a, subsets_a, group)
    sums = a.local.new_zeros(len(subsets_a), dtype=torch.float64)
    for there, rows in b.windows(group, WINDOW_ROWS):
        rows = rows.double()
        for number, (x, chosen) in enumerate(zip(mine, subsets_b, strict=True)):
            here = chosen[(chosen >= there.start) & (chosen < there.stop)] - there.start
            sums[number] += (a.local[x].double() @ rows[here].T / rows.shape[1] + 1).pow(3).sum()
    return sums


def _diagonal_sums(a: FeatureShard, subsets: list[Tensor], group: ReduceGroup) -> Tensor:
    """[subsets] what this rank's rows are with themselves, which is to be left out."""
    alone = (a.local.double().square().sum(1) / a.local.shape[1] + 1).pow(3)
    return torch.stack([alone[mine].sum() for mine in _local_rows(a, subsets, group)])


def _local_rows(share: FeatureShard, subsets: list[Tensor], group: ReduceGroup) -> list[Tensor]:
    """Where among its own rows this rank has those of each subset."""
    at = torch.full((share.count,), -1, dtype=torch.long, device=share.local.device)
    rows = share.rows(group)
    at[rows] = torch.arange(len(rows), device=at.device)
    return [(there := at[subset])[there >= 0] for subset in subsets]
