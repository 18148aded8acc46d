"""The kernel Inception distance (Bińkowski et al. 2018, arXiv 1801.01401) of features sharded over ranks."""

import torch
from torch import Tensor

from paragan.core.host_copies import copy_to_device
from paragan.eval.sharding import SINGLE, FeatureShard, ReduceGroup

WINDOW_ROWS = 8192  # rows that every rank holds at a time
BLOCK_ROWS = 1024  # of these, of which the kernel with a window is computed at a time


def kid(
    real: FeatureShard,
    fake: FeatureShard,
    *,
    subsets: int = 100,
    subset_size: int = 1000,
    seed: int = 0,
    group: ReduceGroup = SINGLE,
) -> float:
    """Compute the squared maximum mean discrepancy of features, averaged over random subsets.

    The kernel is (x.y / F + 1)^3. The estimate is unbiased, so for equal distributions it is negative half of the time.
    Every rank sums over the pairs of its own rows with all rows, which are gathered window by window.

    Args:
        real: Features of reals [N, F].
        fake: Features of fakes [M, F].
        subsets: Number of subsets.
        subset_size: Vectors of each side in a subset; at most N and M.
        seed: Seed of the subsets, which are those of torchmetrics.
        group: All ranks; every rank calls this.
    """
    size = min(subset_size, real.count, fake.count)
    pairs = _draw_subsets(real.count, fake.count, subsets, size, seed)
    real_rows, fake_rows = ([pair[side] for pair in pairs] for side in (0, 1))
    xx = _kernel_sums(real, real, real_rows, real_rows, group) - _diagonal_sums(real, real_rows, group)
    yy = _kernel_sums(fake, fake, fake_rows, fake_rows, group) - _diagonal_sums(fake, fake_rows, group)
    xy = _kernel_sums(real, fake, real_rows, fake_rows, group)
    sums = torch.stack([xx, yy, xy])
    group.all_reduce_sum(sums).wait()
    within = (sums[0] + sums[1]) / (size * (size - 1))
    return (within - 2 * sums[2] / size**2).mean().item()


def _draw_subsets(n: int, m: int, subsets: int, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return (rows of the reals, rows of the fakes) of each subset, `size` each, on the host."""
    generator = torch.Generator().manual_seed(seed)
    pairs: list[tuple[Tensor, Tensor]] = []
    for _ in range(subsets):
        real_rows = torch.randperm(n, generator=generator)[:size]
        fake_rows = torch.randperm(m, generator=generator)[:size]
        pairs.append((real_rows, fake_rows))
    return pairs


def _kernel_sums(
    a: FeatureShard, b: FeatureShard, subsets_a: list[Tensor], subsets_b: list[Tensor], group: ReduceGroup
) -> Tensor:
    """Return [subsets]: the sum of the kernel over pairs of this rank's rows of `a` with all rows of `b`.

    Subsets that have more pairs together than `a` and `b` are sums over one kernel of all pairs.
    """
    local_rows = _local_rows(a, subsets_a, group)
    shares_kernel = a.count * b.count < sum(len(x) * len(y) for x, y in zip(subsets_a, subsets_b, strict=True))
    sums = a.local.new_zeros(len(subsets_a), dtype=torch.float64)
    for window, features in b.windows(group, WINDOW_ROWS):
        features = features.double()
        in_window = [subset[(subset >= window.start) & (subset < window.stop)] - window.start for subset in subsets_b]
        columns = [copy_to_device(positions, features.device) for positions in in_window]
        if shares_kernel:
            sums += _sums_of_all_pairs(a.local, features, local_rows, columns)
        else:
            for i, (x, y) in enumerate(zip(local_rows, columns, strict=True)):
                sums[i] += _kernel(a.local[x].double(), features[y]).sum()
    return sums


def _sums_of_all_pairs(a: Tensor, b: Tensor, rows: list[Tensor], columns: list[Tensor]) -> Tensor:
    """Return [subsets]: the sum of the kernel of `a` and `b` over the rows and columns of each subset."""
    row_indicator, column_indicator = _indicator(rows, len(a), b), _indicator(columns, len(b), b)
    sums = b.new_zeros(len(rows))
    for block in torch.arange(len(a), device=a.device).split(BLOCK_ROWS):
        sums += ((row_indicator[:, block] @ _kernel(a[block].double(), b)) * column_indicator).sum(1)
    return sums


def _indicator(subsets: list[Tensor], count: int, like: Tensor) -> Tensor:
    """Return [subsets, count], of the dtype and device of `like`: 1 for the rows that are in a subset, else 0."""
    indicator = like.new_zeros(len(subsets), count)
    for i, subset in enumerate(subsets):
        indicator[i, subset] = 1
    return indicator


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    """Return (x.y / F + 1)^3 of x [N, F] and y [M, F]: [N, M]."""
    return (x @ y.T / y.shape[1] + 1).pow(3)


def _diagonal_sums(a: FeatureShard, subsets: list[Tensor], group: ReduceGroup) -> Tensor:
    """Return [subsets]: the sum of the kernel of this rank's rows with themselves, which is to be left out."""
    diagonal = (a.local.double().square().sum(1) / a.local.shape[1] + 1).pow(3)
    return torch.stack([diagonal[rows].sum() for rows in _local_rows(a, subsets, group)])


def _local_rows(shard: FeatureShard, subsets: list[Tensor], group: ReduceGroup) -> list[Tensor]:
    """Return, for each subset, the positions of its rows among this rank's rows, where those are."""
    position = torch.full((shard.count,), -1, dtype=torch.long)
    rows = shard.host_rows(group)
    position[rows] = torch.arange(len(rows))
    positions = [position[subset] for subset in subsets]
    return [copy_to_device(p[p >= 0], shard.local.device) for p in positions]
