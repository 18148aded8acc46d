"""The scores as functions of features; nothing here knows of images, names or protocols.

Fréchet distance (Heusel et al. 2017, arXiv 1706.08500), kernel distance (Bińkowski et al. 2018, arXiv
1801.01401), Inception score (Salimans et al. 2016, arXiv 1606.03498), precision and recall (Kynkäänniemi et
al. 2019, arXiv 1904.06991), density and coverage (Naeem et al. 2020, arXiv 2002.09797). The first three are
torchmetrics'; all arithmetic is in float64.
"""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from paragan.errors import Unusable
from paragan.eval.shares import ALONE, Summing, dealt

# moments ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution fitted to `count` feature vectors."""

    count: int
    mean: Tensor  # [F] float64
    covariance: Tensor  # [F, F] float64, divided by count - 1


class Moments:
    """First and second moments of a stream of features, [n, F] at a time; `gaussian` joins all ranks'.

    Sums are taken about the first batch's mean and joined about the common one (Chan et al. 1979), since
    plain sums of squares cancel just where it matters: in a collapsed generator's small variances.
    """

    def __init__(self, num_features: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.origin: Tensor | None = None  # [F], where the sums are taken about
        self.total = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.products = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)

    def add(self, features: Tensor) -> None:
        x = features.double()
        if self.origin is None:
            self.origin = x.mean(0)
        x = x - self.origin
        self.count += len(x)
        self.total += x.sum(0)
        self.products.addmm_(x.T, x)

    def gaussian(self, group: Summing = ALONE) -> Gaussian:
        """The Gaussian of what all ranks have added. Raises `Unusable` for fewer than two vectors."""
        offset = self.total / max(self.count, 1)
        own_mean = offset if self.origin is None else self.origin + offset
        sums = torch.cat([own_mean * self.count, own_mean.new_tensor([self.count])])
        group.sum(sums).wait()
        count = int(sums[-1])
        if count < 2:
            raise Unusable(f"count: a covariance needs at least 2 images, not {count}")
        mean = sums[:-1] / count
        away = own_mean - mean
        scatter = self.products - self.count * (torch.outer(offset, offset) - torch.outer(away, away))
        group.sum(scatter).wait()
        return Gaussian(count, mean, scatter / (count - 1))


# by torchmetrics --------------------------------------------------------------------------------------------


def frechet(a: Gaussian, b: Gaussian) -> float:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), in units of squared features.

    torchmetrics reads its own running sums, which are filled here from moments that ranks have joined, both
    about the mean of `b`: that changes no distance and cancels no digits. It takes square roots of
    eigenvalues of S1 S2, so a rounding of 1e-16 in a direction without variance becomes one of 1e-8.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance  # here, for it takes a second

    size = len(a.mean)
    metric = FrechetInceptionDistance(_AsTheyAre(size), sync_on_compute=False)
    metric.update(torch.zeros(0, size, dtype=torch.float64), real=True)  # to compute in float64
    for side, g in (("real", a), ("fake", b)):
        mean, covariance = (g.mean - b.mean).cpu(), g.covariance.cpu()
        setattr(metric, f"{side}_features_num_samples", torch.tensor(g.count))
        setattr(metric, f"{side}_features_sum", g.count * mean)
        setattr(metric, f"{side}_features_cov_sum", (g.count - 1) * covariance + g.count * torch.outer(mean, mean))
    return max(metric.compute().item(), 0.0)


class _AsTheyAre(nn.Identity):
    """Features that need no network."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features


def kid(real: Tensor, fake: Tensor, *, subsets: int = 100, subset_size: int = 1000, seed: int = 0) -> float:
    """Squared maximum mean discrepancy of real [N, F] and fake [M, F] features, mean over random subsets.

    The kernel is (x.y / F + 1)^3. Being unbiased, it is as often negative as positive for equal
    distributions. Subsets are of at most N and M vectors, and follow from `seed`.
    """
    from torchmetrics.image.kid import KernelInceptionDistance  # here, for it takes a second

    subset_size = min(subset_size, len(real), len(fake))
    with quiet(), seeded(seed):
        metric = KernelInceptionDistance(nn.Identity(), subsets, subset_size, sync_on_compute=False)
        metric.update(real.double(), real=True)
        metric.update(fake.double(), real=False)
        return metric.compute()[0].item()


def inception_score(logits: Tensor, *, splits: int = 10, seed: int = 0) -> float:
    """exp of the mean KL(p(y|x) | p(y)) of logits [N, K], mean over random splits; between 1 and K."""
    from torchmetrics.image.inception import InceptionScore  # likewise

    logits = logits.double()
    logits = logits.maximum(logits.amax(1, keepdim=True) - 600)  # torchmetrics makes 0 log 0 a NaN
    with quiet(), seeded(seed):
        metric = InceptionScore(nn.Identity(), splits, sync_on_compute=False)
        metric.update(logits)
        return metric.compute()[0].item()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The CPU's generator, from which torchmetrics draws, starts at `seed` here and is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without torchmetrics' warning that these metrics keep all features: here they are given all at once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*will save all extracted features", category=UserWarning)
        yield


# manifolds --------------------------------------------------------------------------------------------------


class PRDC(NamedTuple):
    precision: float  # share of fakes that lie on the reals' manifold: fidelity
    recall: float  # share of reals that lie on the fakes' manifold: diversity
    density: float  # how many real balls a fake lies in, over k; may exceed 1
    coverage: float  # share of reals whose ball holds a fake


def prdc(real: Tensor, fake: Tensor, k: int = 5, *, chunk: int = 1024, group: Summing = ALONE) -> PRDC:
    """Precision, recall, density and coverage of fake [M, F] against real [N, F], the same on every rank.

    A manifold is the union of closed balls around each vector that reach its k-th nearest neighbour. Every
    rank has all features and takes its share of rows, `chunk` at a time: distances take a few times 8 chunk
    max(N, M) bytes. Raises `Unusable` where either set has not more than k vectors.
    """
    if min(len(real), len(fake)) <= k:
        raise Unusable(f"count: {k} nearest neighbours need at least {k + 1} images, not {min(len(real), len(fake))}")
    centre = real.double().mean(0)
    x, y = real.double() - centre, fake.double() - centre
    # Distances come from a matrix product, so equal vectors end up 1e-8 of their length apart; equal counts
    # as inside.
    slack = 1e-7 * max(x.norm(dim=1).max(), y.norm(dim=1).max())
    reach_x, reach_y = (radii(z, k, chunk, group) + slack for z in (x, y))
    balls_around = x.new_zeros(len(y))  # real balls that hold each fake
    reals = x.new_zeros(2)  # on the fakes' manifold, and with a fake in their ball
    for rows in dealt(len(x), chunk, group.rank, group.size):
        apart = distances(x[rows.start : rows.stop], y)  # [rows, M]
        holds = apart <= reach_x[rows.start : rows.stop, None]
        balls_around += holds.sum(0)
        reals += torch.stack([(apart <= reach_y).any(1).sum(), holds.any(1).sum()])
    tally = torch.cat([reals, balls_around])
    group.sum(tally).wait()
    recalled, covered, balls_around = tally[0].item(), tally[1].item(), tally[2:]
    precision = (balls_around > 0).double().mean().item()
    return PRDC(precision, recalled / len(x), balls_around.mean().item() / k, covered / len(x))


def radii(x: Tensor, k: int, chunk: int, group: Summing = ALONE) -> Tensor:
    """Distance of each of [N, F] to its k-th nearest neighbour, itself not counted: [N] on every rank."""
    result = x.new_zeros(len(x))
    for rows in dealt(len(x), chunk, group.rank, group.size):
        apart = distances(x[rows.start : rows.stop], x)
        result[rows.start : rows.stop] = apart.kthvalue(k + 1, dim=1).values  # the nearest is itself
    group.sum(result).wait()
    return result


def distances(a: Tensor, b: Tensor) -> Tensor:
    """Euclidean, [n, F] x [m, F] -> [n, m]; by matrix product, ten times faster than pair by pair."""
    return torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist")
