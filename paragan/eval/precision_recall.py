"""Precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991), density and coverage (Naeem et al. 2020, arXiv
2002.09797), of features sharded over ranks.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.eval.sharding import SINGLE, FeatureShard, ReduceGroup

WINDOW_ROWS = 4096  # rows that every rank holds at a time


class PRDC(NamedTuple):
    """The four scores."""

    precision: float  # fraction of fakes on the manifold of the reals: fidelity
    recall: float  # fraction of reals on the manifold of the fakes: diversity
    density: float  # mean number of real balls that contain a fake, divided by k; may exceed 1
    coverage: float  # fraction of reals whose ball contains a fake


def prdc(real: FeatureShard, fake: FeatureShard, k: int = 5, *, chunk: int = 1024, group: ReduceGroup = SINGLE) -> PRDC:
    """Compute precision, recall, density and coverage; the same on every rank.

    A manifold is the union of closed balls around all vectors, each of which reaches to the k-th nearest neighbor.

    Args:
        real: Features of reals [N, F].
        fake: Features of fakes [M, F].
        k: Number of neighbors.
        chunk: Rows of this rank that are compared with a window at a time.
        group: All ranks; every rank calls this.

    Raises:
        UsageError: A set has no more than k vectors.
    """
    count = min(real.count, fake.count)
    if count <= k:
        raise UsageError(f"count={count}: {k} nearest neighbors need at least {k + 1} images. Use more images")
    center, slack = _center_and_slack(real, fake, group)
    real_radii = _radii(real, center, k, chunk, group) + slack  # [N]
    fake_radii = _radii(fake, center, k, chunk, group) + slack  # [M]
    local_radii = real_radii[real.rows(group)]
    recalled = torch.zeros(len(real.local), dtype=torch.bool, device=real.local.device)
    covered = torch.zeros_like(recalled)
    num_balls = fake_radii.new_zeros(len(fake_radii))  # real balls that contain each fake
    for window, rows, distances in _distance_blocks(real, fake, center, chunk, group):
        contains = distances <= local_radii[rows, None]
        num_balls[window.start : window.stop] += contains.sum(0)
        covered[rows] |= contains.any(1)
        recalled[rows] |= (distances <= fake_radii[window.start : window.stop]).any(1)
    sums = torch.cat([torch.stack([recalled.sum(), covered.sum()]).double(), num_balls])
    group.all_reduce_sum(sums).wait()
    num_balls = sums[2:]
    means = torch.stack([(num_balls > 0).double().mean(), num_balls.mean()])
    recall, coverage, precision, density = torch.cat([sums[:2] / real.count, means]).tolist()
    return PRDC(precision, recall, density / k, coverage)


def _center_and_slack(real: FeatureShard, fake: FeatureShard, group: ReduceGroup) -> tuple[Tensor, Tensor]:
    """Return the mean of the reals [F], and a tolerance [] that is added to radii.

    Distances come from a matrix product, so equal vectors have a distance of up to 1e-8 of their length; they must
    count as inside.
    """
    center = real.local.double().sum(0)
    group.all_reduce_sum(center).wait()
    center /= real.count
    lengths = torch.cat([(shard.local.double() - center).norm(dim=1) for shard in (real, fake)])
    longest = lengths.amax(0, keepdim=True) if len(lengths) else lengths.new_zeros(1)
    gathered, work = group.all_gather(longest)
    work.wait()
    return center, 1e-7 * gathered.max()


def _radii(shard: FeatureShard, center: Tensor, k: int, chunk: int, group: ReduceGroup) -> Tensor:
    """Return the distance of each vector to its k-th nearest neighbor, [count] on every rank."""
    nearest = center.new_full((len(shard.local), k + 1), torch.inf)  # the first is the vector itself
    for _, rows, distances in _distance_blocks(shard, shard, center, chunk, group):
        smallest = distances.topk(min(k + 1, distances.shape[1]), dim=1, largest=False).values
        nearest[rows] = torch.cat([nearest[rows], smallest], 1).topk(k + 1, dim=1, largest=False).values
    result = center.new_zeros(shard.count)
    result[shard.rows(group)] = nearest[:, k]
    group.all_reduce_sum(result).wait()
    return result


def _distance_blocks(
    a: FeatureShard, b: FeatureShard, center: Tensor, chunk: int, group: ReduceGroup
) -> Iterator[tuple[range, slice, Tensor]]:
    """Yield the distances of this rank's rows of `a` to all of `b`: (rows of b, local rows of a, distances)."""
    for window, features in b.windows(group, WINDOW_ROWS):
        y = features.double() - center
        for start in range(0, len(a.local), chunk):
            rows = slice(start, min(start + chunk, len(a.local)))
            yield window, rows, pairwise_distances(a.local[rows].double() - center, y)


def pairwise_distances(a: Tensor, b: Tensor) -> Tensor:
    """Compute Euclidean distances [n, F] x [m, F] -> [n, m] by a matrix product: ten times faster than pair by pair."""
    return torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist")
