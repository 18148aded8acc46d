"""Moments of real images in a feature space, in a file that other programs read too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paragan.core.atomic_write import aside
from paragan.core.errors import Unusable
from paragan.core.rng import CPU
from paragan.data.dataset import Images
from paragan.data.tools.parallel_map import Tell
from paragan.eval.accumulators import Look, OfAll
from paragan.eval.feature_stats import Summary, look
from paragan.eval.features import by_name
from paragan.eval.frechet import Gaussian
from paragan.eval.metrics import metric_names
from paragan.eval.sharding import ALONE

BLOCK = 64  # images that are looked at together


def reference(
    images: Images, features: str, inception: str | None = None, count: int | None = None, tell: Tell | None = None
) -> Summary:
    """What a Frechet distance needs to know of real images, `BLOCK` of them in memory at a time.

    count : how many, evenly chosen (None: all). Raises `Unusable` for fewer than two, or more than there are
    """
    size, (channels, resolution, _) = len(images.images), images.shape
    wanted = size if count is None else count
    if not 2 <= wanted <= size:
        raise Unusable(f"--count {wanted} must be from 2 to {size}, the number of images")
    rows = np.linspace(0, size - 1, wanted).astype(np.int64)

    def sample(indices: range) -> Tensor:
        pixels = images.images[rows[indices.start : indices.stop]]  # [n, R, R, C]
        if tell:
            tell(indices.stop, wanted)
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)))

    space = by_name(features, resolution, channels, inception)
    metric_names("fd", space)  # refuses a covariance that is too large
    return look(sample, Look(space, wanted, BLOCK, 0, 0, CPU), [OfAll()], ALONE)


def save(summary: Summary, out: Path) -> None:
    """`mu` [F] and `sigma` [F, F] float64, `count`, and by which `space` (`space_hash`, `resizer`) of [C, H, W] images.

    Complete or not at all; an older file is replaced.
    """
    if out.suffix != ".npz":
        raise Unusable(f"--out {out} must end in .npz, such as stats.npz")
    gaussian: Gaussian = summary.of(OfAll())
    space = summary.space
    with aside(out) as path, path.open("wb") as file:
        np.savez(
            file,
            allow_pickle=False,
            mu=gaussian.mean.cpu().numpy(),
            sigma=gaussian.covariance.cpu().numpy(),
            count=np.int64(gaussian.count),
            space=np.str_(space.name),
            space_hash=np.str_(space.hash),
            resizer=np.str_(space.resizer),
            image=np.array(summary.image),
        )
