"""Degrade images as a camera and a smaller sensor would: random blur, reduction, and noise, drawn for every image.

The first-order model of Zhang et al. 2021 ("Designing a Practical Degradation Model", arXiv:2103.14006) and Wang et al.
2021 ("Real-ESRGAN", arXiv:2107.10833), without compression. Blur and reduction are linear in rows and in columns, so
each image is multiplied by one matrix from either side.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from paragan.core.rng import LaneRng

LEAST_SIGMA = 0.01  # pixels: no blur


def degrade(images: Tensor, rng: LaneRng, scale: int, max_blur: float, max_noise: float) -> Tensor:
    """Return smaller images [N, C, H / scale, W / scale] in [-1, 1].

    Each image is blurred by a Gaussian of 0 to `max_blur`, reduced by averaging or by bicubic interpolation with
    antialiasing, and gets Gaussian noise of 0 to `max_noise`.

    Args:
        images: [N, C, H, W] in [-1, 1].
        rng: the random numbers of their lanes: the same for the same (seed, lane, position).
        scale: factor of the reduction; divides H and W.
        max_blur: largest standard deviation of the blur, pixels of the smaller image.
        max_noise: largest standard deviation of the noise.
    """
    with torch.autocast(images.device.type, enabled=False):
        sigma = rng.uniform("degradation/blur") * (max_blur * scale)
        averages = rng.uniform("degradation/reduction") < 0.5
        rows, columns = (_reduction(size, scale, sigma, averages, images) for size in images.shape[2:])
        small = rows[:, None] @ images @ columns.mT[:, None]
        deviation = (rng.uniform("degradation/noise size") * max_noise)[:, None, None, None]
        noise = rng.normal("degradation/noise", *small.shape[1:])
        return (small + deviation.to(small.dtype) * noise.to(small.dtype)).clamp(-1, 1)


def _reduction(size: int, scale: int, sigma: Tensor, averages: Tensor, like: Tensor) -> Tensor:
    """Return the matrices [N, size / scale, size] that blur and reduce a row of pixels."""
    average, bicubic = _reduction_kernels(size, scale, like.dtype, like.device)
    return torch.where(averages[:, None, None], average, bicubic) @ blur_matrix(size, sigma.to(like.dtype))


def blur_matrix(size: int, sigma: Tensor) -> Tensor:
    """Return matrices [N, size, size] that blur a row by Gaussians of standard deviations sigma [N], pixels.

    Weights are divided by their sum within the row, so that borders keep their brightness.
    """
    position = torch.arange(size, device=sigma.device, dtype=sigma.dtype)
    distance = (position[:, None] - position) / sigma.clamp(min=LEAST_SIGMA)[:, None, None]
    return (distance.square() / -2).softmax(-1)


@functools.cache
def _reduction_kernels(size: int, scale: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the matrices [size / scale, size] of averaging and of bicubic reduction with antialiasing."""
    identity = torch.eye(size, dtype=torch.float64)
    average = F.avg_pool1d(identity[None], scale)[0].mT
    bicubic = F.interpolate(identity[None, None], (size, size // scale), mode="bicubic", antialias=True)[0, 0].mT
    return average.to(device, dtype), bicubic.to(device, dtype)
