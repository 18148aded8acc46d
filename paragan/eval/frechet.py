"""The Fréchet distance of two Gaussians (Heusel et al. 2017, arXiv 1706.08500), and Gaussians of streams of features.

    moments = RunningMoments(num_features=2048)
    moments.update(features)                           # [n, 2048], for every batch
    frechet_distance(moments.compute(), reference)     # FrechetDistance(value=3.1, error=4e-9)

All arithmetic is in float64. The distance comes from a pivoted Cholesky factor and one symmetric eigenvalue problem,
and has a bound of its rounding error.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.eval.sharding import SINGLE, ReduceGroup, sum_over_ranks

CHUNK_ROWS = 512  # added at once, whatever the size of updates
TILE_COLUMNS = 512  # columns of a covariance updated at once
EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True)
class Gaussian:
    """The normal distribution of `count` feature vectors."""

    count: int
    mean: Tensor  # [F] float64
    covariance: Tensor  # [F, F] float64, divided by count - 1


class RunningMoments:
    """First and second moments of a stream of features, [n, F] at a time; `compute` combines all ranks.

    Sums are centred at the mean of the first rows, and combined around the common mean (Chan et al. 1979): plain sums
    of squares would cancel where it matters, in the small variances of a collapsed generator. Rows are added
    `CHUNK_ROWS` at a time, so that the sums of a rank do not depend on the batch size. Only tiles on and below the
    diagonal are computed.
    """

    def __init__(self, num_features: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.origin: Tensor | None = None  # [F], the centre of the sums
        self.total = torch.zeros(num_features, dtype=torch.float64, device=device)
        self.products = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)
        self._pending: list[Tensor] = []

    def update(self, features: Tensor) -> None:
        """Add features [n, F]."""
        self._pending.append(features)
        if sum(map(len, self._pending)) < CHUNK_ROWS:
            return
        *full, rest = torch.cat(self._pending).split(CHUNK_ROWS)
        if len(rest) == CHUNK_ROWS:
            full.append(rest)
            rest = rest[:0]
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
        for start in range(0, x.shape[1], TILE_COLUMNS):
            columns = slice(start, start + TILE_COLUMNS)
            self.products[start:, columns].addmm_(x[:, start:].T, x[:, columns])

    def compute_or_none(self, group: ReduceGroup = SINGLE) -> Gaussian | None:
        """Return the Gaussian of the features of all ranks; None for fewer than two. Every rank calls it."""
        if num_pending := sum(map(len, self._pending)):
            self._accumulate(torch.cat(self._pending)[:num_pending])
            self._pending = []
        offset = self.total / max(self.count, 1)
        own_mean = offset if self.origin is None else self.origin + offset
        count = int(sum_over_ranks(group, self.count))
        total = own_mean * self.count
        group.all_reduce_sum(total).wait()
        if count < 2:
            return None
        mean = total / count
        shift = own_mean - mean
        products = self.products.tril() + self.products.tril(-1).T
        scatter = products - self.count * (torch.outer(offset, offset) - torch.outer(shift, shift))
        group.all_reduce_sum(scatter).wait()
        return Gaussian(count, mean, scatter / (count - 1))

    def compute(self, group: ReduceGroup = SINGLE) -> Gaussian:
        """Return the Gaussian as `compute_or_none`. Raises `UsageError` for fewer than two vectors."""
        gaussian = self.compute_or_none(group)
        if gaussian is None:
            raise UsageError("count: a covariance needs at least 2 images. Use a larger count")
        return gaussian


class FrechetDistance(NamedTuple):
    value: float  # in units of squared features
    error: float  # bound of the rounding error


def frechet_distance(a: Gaussian, b: Gaussian) -> FrechetDistance:
    """Compute |m1 - m2|^2 + tr(S1 + S2 - 2 (S1 S2)^(1/2)) with a bound of its rounding error.

    S1 S2 has the eigenvalues of the symmetric matrix L' S2 L with L L' = S1. A covariance of n vectors has rank n - 1
    at most, so further eigenvalues are known to be 0 and are left out. The error of the others is at most
    |S2| |S1 - L L'|, which is measured, plus the rounding of the products, which grows with the square root of their
    length (Higham and Mary 2019).
    """
    a, b = sorted((a, b), key=lambda g: g.count)  # the smaller problem factors the lower rank
    a_mean, s = _on_host(a)
    b_mean, t = _on_host(b)
    lower, residual = pivoted_cholesky(s)
    eigenvalues = torch.linalg.eigvalsh(lower.T @ t @ lower).clamp(min=0)
    eigenvalues = eigenvalues[max(0, len(eigenvalues) - (b.count - 1)) :]
    rounding = EPS * len(s) ** 0.5
    eigenvalue_error = t.norm().item() * (residual + rounding * s.norm().item())
    mean_distance = (a_mean - b_mean).square().sum().item()
    traces = (s.trace() + t.trace()).item()
    value = mean_distance + traces - 2 * eigenvalues.sqrt().sum().item()
    error = 2 * _root_sum_error(eigenvalues, eigenvalue_error) + rounding * (mean_distance + traces)
    return FrechetDistance(max(value, 0.0), error)


def _on_host(gaussian: Gaussian) -> tuple[Tensor, Tensor]:
    """Return mean and covariance on the host, copied at once."""
    rows = torch.cat([gaussian.mean[None], gaussian.covariance]).cpu()
    return rows[0], rows[1:]


def pivoted_cholesky(covariance: Tensor) -> tuple[Tensor, float]:
    """Return L [F, rank] with L L' = `covariance`, and the Frobenius norm of the residual.

    Pivots are needed because covariances may be singular. Takes a twentieth of the time of a root by eigenvectors.
    """
    from scipy.linalg import lapack  # slow to import

    packed, pivots, rank, _ = lapack.dpstrf(covariance.numpy(), lower=1)  # pyright: ignore[reportAttributeAccessIssue]
    lower = torch.zeros(len(covariance), rank, dtype=torch.float64)
    lower[torch.from_numpy(pivots - 1).long()] = torch.from_numpy(np.tril(packed)[:, :rank])
    return lower, (covariance - lower @ lower.T).norm().item()


def _root_sum_error(squares: Tensor, error: float) -> float:
    """Return the largest error of the sum of the square roots, if each square has an error up to `error`."""
    roots = squares.sqrt()
    below = roots - (squares - error).clamp(min=0).sqrt()
    above = (squares + error).sqrt() - roots
    return torch.maximum(below, above).sum().item()
