"""Precision and recall (Kynkäänniemi et al. 2019, arXiv 1904.06991), density and coverage (Naeem et al. 2020, arXiv
2002.09797), over features that many ranks hold."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.eval.sharding import SINGLE, FeatureShard, ReduceGroup

WINDOW_ROWS = 4096  # rows that are on every rank at a time


class PRDC(NamedTuple):
    precision: float  # share of fakes that lie on the reals' manifold: fidelity
    recall: float  # share of reals that lie on the fakes' manifold: diversity
    density: float  # how many real balls a fake lies in, over k; may exceed 1
    coverage: float  # share of reals whose ball holds a fake


def prdc(real: FeatureShard, fake: FeatureShard, k: int = 5, *, chunk: int = 1024, group: ReduceGroup = SINGLE) -> PRDC:
    """Precision, recall, density and coverage of fake [M, F] against real [N, F], the same on every rank.

    A manifold is the union of closed balls around each vector that reach its k-th nearest neighbour. Every
    rank looks from its own rows, `chunk` at a time, at windows of all. Raises `Unusable` where either set has
    not more than k vectors.
    """
    if min(real.count, fake.count) <= k:
        raise UsageError(
            f"count: {k} nearest neighbours need at least {k + 1} images, not {min(real.count, fake.count)}"
        )
    centre, slack = _center_and_slack(real, fake, group)
    reach_x, reach_y = (_radii(z, centre, k, chunk, group) + slack for z in (real, fake))  # [N], [M]
    x, own_reach = real.local, reach_x[real.rows(group)]
    recalled, covered = (torch.zeros(len(x), dtype=torch.bool, device=x.device) for _ in range(2))
    balls_around = reach_y.new_zeros(len(reach_y))  # real balls that hold each fake
    for there, rows, apart in _distance_blocks(real, fake, centre, chunk, group):
        holds = apart <= own_reach[rows, None]
        balls_around[there.start : there.stop] += holds.sum(0)
        covered[rows] |= holds.any(1)
        recalled[rows] |= (apart <= reach_y[there.start : there.stop]).any(1)
    tally = torch.cat([torch.stack([recalled.sum(), covered.sum()]).double(), balls_around])
    group.all_reduce_sum(tally).wait()
    found, balls_around = tally[:2] / real.count, tally[2:]
    precision = (balls_around > 0).double().mean().item()
    return PRDC(precision, found[0].item(), balls_around.mean().item() / k, found[1].item())


def _center_and_slack(real: FeatureShard, fake: FeatureShard, group: ReduceGroup) -> tuple[Tensor, float]:
    """The mean of the reals, [F]; and the slack of a ball. Distances come from a matrix product, so equal vectors
    end up 1e-8 of their length apart; equal counts as inside."""
    centre = real.local.double().sum(0)
    group.all_reduce_sum(centre).wait()
    centre /= real.count
    lengths = torch.cat([(z.local.double() - centre).norm(dim=1) for z in (real, fake)])
    longest = lengths.amax(0, keepdim=True) if len(lengths) else lengths.new_zeros(1)
    gathered, work = group.all_gather(longest)
    work.wait()
    return centre, 1e-7 * gathered.max().item()


def _radii(share: FeatureShard, center: Tensor, k: int, chunk: int, group: ReduceGroup) -> Tensor:
    """Distance of each vector to its k-th nearest neighbour, itself not counted: [count] on every rank."""
    best = center.new_full((len(share.local), k + 1), torch.inf)  # the nearest is itself
    for _, rows, apart in _distance_blocks(share, share, center, chunk, group):
        nearest = apart.topk(min(k + 1, apart.shape[1]), dim=1, largest=False).values
        best[rows] = torch.cat([best[rows], nearest], 1).topk(k + 1, dim=1, largest=False).values
    result = center.new_zeros(share.count)
    result[share.rows(group)] = best[:, k]
    group.all_reduce_sum(result).wait()
    return result


def _distance_blocks(
    a: FeatureShard, b: FeatureShard, center: Tensor, chunk: int, group: ReduceGroup
) -> Iterator[tuple[range, slice, Tensor]]:
    """Distances of this rank's rows of `a` to all of `b`: (which of b, which of its own, [own, b])."""
    for there, rows in b.windows(group, WINDOW_ROWS):
        y = rows.double() - center
        for low in range(0, len(a.local), chunk):
            mine = slice(low, min(low + chunk, len(a.local)))
            yield there, mine, pairwise_distances(a.local[mine].double() - center, y)


def pairwise_distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean, [n, F] x [m, F] -> [n, m]; by matrix product, ten times faster than pair by pair."""
    return torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist")
