"""Write mean and covariance of real images in a feature space, to a file that other programs can read."""

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
from paragan.eval import classifier
from paragan.eval.accumulators import FeaturePass, GaussianAcc
from paragan.eval.feature_stats import FeatureStats, extract
from paragan.eval.features import named_space
from paragan.eval.frechet import Gaussian
from paragan.eval.metrics import metric_names
from paragan.eval.sharding import SINGLE

BLOCK_IMAGES = 64  # images of a forward pass


def compute_reference(
    dataset: Dataset,
    features: str,
    inception: str | None = None,
    count: int | None = None,
    on_progress: ProgressFn | None = None,
) -> FeatureStats:
    """Compute the statistics of real images for a Frechet distance, `BLOCK_IMAGES` of them in memory at a time.

    Args:
        features: name of the feature space.
        inception: file of the Inception weights, for spaces that need them.
        count: how many images, evenly chosen; None for all.
        on_progress: called with (images done, images in all).

    Raises:
        UsageError: `count` is below 2 or above the number of images, or `features` is no space of statistics.
    """
    if features == classifier.SPACE_NAME or ":" in features:
        raise UsageError(f"--features {features}: statistics are of pixels or inception only. Use pixels or inception")
    num_images = len(dataset.images)
    channels, _, _ = dataset.shape
    if count is None:
        count = num_images
    if not 2 <= count <= num_images:
        raise UsageError(f"--count {count}: must be from 2 to {num_images}, the number of images")
    rows = np.linspace(0, num_images - 1, count).astype(np.int64)

    def sample(indices: range) -> Tensor:
        pixels = dataset.images[rows[indices.start : indices.stop]]  # [n, H, W, C]
        if on_progress:
            on_progress(indices.stop, count)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))

    space = named_space(features, dataset.size.resolution, channels, inception)
    metric_names("fd", space)  # refuses a covariance that is too large
    return extract(sample, FeaturePass(space, count, BLOCK_IMAGES, 0, 0, CPU), [GaussianAcc()], SINGLE)


def save_reference(feature_stats: FeatureStats, out: Path) -> None:
    """Write an .npz file, complete or not at all; an older one is replaced.

    Its arrays: `mu` [F] and `sigma` [F, F], float64; `count`; `space`, `space_hash` and `resizer` name the feature
    space; `image` is the shape [C, H, W] of the images.

    Raises:
        UsageError: `out` cannot be written.
    """
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
