"""The Fréchet distance of two Gaussians (Heusel et al. 2017, arXiv 1706.08500), and how they are fitted to a stream.

    moments = Moments(num_features=2048)
    moments.add(features)                      # [n, 2048], again and again
    frechet(moments.gaussian(), reference)     # Distance(value=3.1, error=4e-9)

All arithmetic is in float64.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.linalg import lapack
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.eval.sharding import SINGLE, ReduceGroup

CHUNK_ROWS = 512  # that are added at once, however many come
TILE_COLUMNS = 512  # columns of a covariance that are added at once
EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution fitted to `count` feature vectors."""

    count: int
    mean: Tensor  # [F] float64
    covariance: Tensor  # [F, F] float64, divided by count - 1


class RunningMoments:
    """First and second moments of a stream of features, [n, F] at a time; `gaussian` joins all ranks'.

    Sums are taken about the mean of the first rows and joined about the common one (Chan et al. 1979), since
    plain sums of squares cancel just where it matters: in a collapsed generator's small variances. Rows are
    added `ROWS` at a time, so the sums of a rank do not depend on how many come together, and only tiles on and
    below the diagonal are.
    """

    def __init__(self, num_features: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.origin: Tensor | None = None  # [F], where the sums are taken about
        self.total = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.products = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        self._pending: list[Tensor] = []

    def update(self, features: Tensor) -> None:
        self._pending.append(features)
        if sum(map(len, self._pending)) < CHUNK_ROWS:
            return
        *full, rest = torch.cat(self._pending).split(CHUNK_ROWS)
        if len(rest) == CHUNK_ROWS:
            full, rest = [*full, rest], rest[:0]
        for rows in full:
            self._accumulate(rows)
        self._pending = [rest.clone()]

    def _accumulate(self, rows: Tensor) -> None:
        x = rows.double()
        if self.origin is None:
            self.origin = x.mean(0)
        x = x - self.origin
        self.count += len(x)
        self.total += x.sum(0)
        for low in range(0, x.shape[1], TILE_COLUMNS):
            self.products[low:, low : low + TILE_COLUMNS].addmm_(x[:, low:].T, x[:, low : low + TILE_COLUMNS])

    def compute_or_none(self, group: ReduceGroup = SINGLE) -> Gaussian | None:
        """The Gaussian of what all ranks have added; None of fewer than two vectors."""
        if waiting := sum(map(len, self._pending)):
            self._accumulate(torch.cat(self._pending)[:waiting])
            self._pending = []
        offset = self.total / max(self.count, 1)
        own_mean = offset if self.origin is None else self.origin + offset
        sums = torch.cat([own_mean * self.count, own_mean.new_tensor([self.count])])
        group.all_reduce_sum(sums).wait()
        count = int(sums[-1])
        if count < 2:
            return None
        mean = sums[:-1] / count
        away = own_mean - mean
        products = self.products.tril() + self.products.tril(-1).T
        scatter = products - self.count * (torch.outer(offset, offset) - torch.outer(away, away))
        group.all_reduce_sum(scatter).wait()
        return Gaussian(count, mean, scatter / (count - 1))

    def compute(self, group: ReduceGroup = SINGLE) -> Gaussian:
        """The same. Raises `Unusable` for fewer than two vectors."""
        found = self.compute_or_none(group)
        if found is None:
            raise UsageError("count: a covariance needs at least 2 images")
        return found


class FrechetDistance(NamedTuple):
    value: float  # in units of squared features
    error: float  # how far rounding may have moved it


def frechet_distance(a: Gaussian, b: Gaussian) -> FrechetDistance:
    """|m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)), and what it may be wrong by.

    S1 S2 has the eigenvalues of the symmetric L' S2 L, where L L' = S1. Of n vectors a covariance has rank n - 1
    at most: eigenvalues beyond are known to be 0, and left out. Each of the others is off by at most
    |S2| |S1 - L L'|, which is measured, and the rounding of the products, which grows as the root of their
    length (Higham and Mary 2019).
    """
    a, b = sorted((a, b), key=lambda g: g.count)  # the lower rank is the smaller problem
    s, t = a.covariance.cpu(), b.covariance.cpu()
    lower, residual = pivoted_cholesky(s)
    found = torch.linalg.eigvalsh(lower.T @ t @ lower).clamp(min=0)
    squares = found[max(0, len(found) - (b.count - 1)) :]
    rounding = EPS * len(s) ** 0.5
    off = t.norm().item() * (residual + rounding * s.norm().item())
    apart = (a.mean - b.mean).square().sum().item()
    traces = (s.trace() + t.trace()).item()
    value = apart + traces - 2 * squares.sqrt().sum().item()
    return FrechetDistance(max(value, 0.0), 2 * _root_sum_error(squares, off) + rounding * (apart + traces))


def pivoted_cholesky(covariance: Tensor) -> tuple[Tensor, float]:
    """L [F, rank] with L L' = `covariance`, and the Frobenius norm of what is missing.

    Cholesky's with pivots, for covariances may lack rank. A twentieth of the time of a root by eigenvectors.
    """
    packed, pivots, rank, _ = lapack.dpstrf(covariance.numpy(), lower=1)  # pyright: ignore[reportAttributeAccessIssue]
    lower = torch.zeros(len(covariance), rank, dtype=torch.float64)
    lower[torch.from_numpy(pivots - 1).long()] = torch.from_numpy(np.tril(packed)[:, :rank])
    return lower, (covariance - lower @ lower.T).norm().item()


def _root_sum_error(squares: Tensor, error: float) -> float:
    """How far the sum of roots may be off where each square is off by `off`."""
    roots = squares.sqrt()
    below, above = roots - (squares - error).clamp(min=0).sqrt(), (squares + error).sqrt() - roots
    return torch.maximum(below, above).sum().item()
