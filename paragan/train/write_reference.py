"""Moments of real images in a feature space, in a file that other programs read too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.data.tools.parallel_map import ProgressFn
from paragan.eval.accumulators import FeaturePass, GaussianAcc
from paragan.eval.feature_stats import FeatureStats, extract
from paragan.eval.features import named_space
from paragan.eval.frechet import Gaussian
from paragan.eval.metrics import metric_names
from paragan.eval.sharding import SINGLE

BLOCK_IMAGES = 64  # images that are looked at together


def compute_reference(
    dataset: Dataset,
    features: str,
    inception: str | None = None,
    count: int | None = None,
    on_progress: ProgressFn | None = None,
) -> FeatureStats:
    """What a Frechet distance needs to know of real images, `BLOCK` of them in memory at a time.

    count : how many, evenly chosen (None: all). Raises `Unusable` for fewer than two, or more than there are
    """
    size, (channels, resolution, _) = len(dataset.images), dataset.shape
    wanted = size if count is None else count
    if not 2 <= wanted <= size:
        raise UsageError(f"--count {wanted} must be from 2 to {size}, the number of images")
    rows = np.linspace(0, size - 1, wanted).astype(np.int64)

    def sample(indices: range) -> Tensor:
        pixels = dataset.images[rows[indices.start : indices.stop]]  # [n, R, R, C]
        if on_progress:
            on_progress(indices.stop, wanted)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))

    space = named_space(features, resolution, channels, inception)
    metric_names("fd", space)  # refuses a covariance that is too large
    return extract(sample, FeaturePass(space, wanted, BLOCK_IMAGES, 0, 0, CPU), [GaussianAcc()], SINGLE)


def save_reference(feature_stats: FeatureStats, out: Path) -> None:
    """`mu` [F] and `sigma` [F, F] float64, `count`, and by which `space` (`space_hash`, `resizer`) of [C, H, W] images.

    Complete or not at all; an older file is replaced.
    """
    if out.suffix != ".npz":
        raise UsageError(f"--out {out} must end in .npz, such as stats.npz")
    gaussian: Gaussian = feature_stats.get(GaussianAcc())
    space = feature_stats.space
    with atomic_output(out) as path, path.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            mu=gaussian.mean.cpu().numpy(),
            sigma=gaussian.covariance.cpu().numpy(),
            count=np.int64(gaussian.count),
            space=np.str_(space.name),
            space_hash=np.str_(space.hash),
            resizer=np.str_(space.resizer),
            image=np.array(feature_stats.image_shape),
        )
