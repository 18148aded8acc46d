"""Sample a diffusion model: solve its ordinary differential equation from noise to images.

Karras, Aittala, Aila and Laine, "Elucidating the Design Space of Diffusion-Based Generative Models", 2022 (EDM),
algorithm 1: dx / d sigma = (x - D(x; sigma)) / sigma, by Heun's method of the second order.
"""

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

Denoise = Callable[[Tensor, Tensor], Tensor]  # (noisy images [N, ...], sigma [N]) -> images


def noise_schedule(steps: int, sigma_min: float, sigma_max: float, rho: float = 7.0) -> list[float]:
    """Return the standard deviations of noise before every step, and 0 (EDM, equation 5)."""
    ends = [sigma ** (1 / rho) for sigma in (sigma_max, sigma_min)]
    between = [ends[0] + i / max(1, steps - 1) * (ends[1] - ends[0]) for i in range(steps)]
    return [*(x**rho for x in between), 0.0]


def sample_heun(denoise: Denoise, noise: Tensor, sigmas: list[float]) -> Tensor:
    """Return images [N, ...] from normal noise of variance 1 of the same shape, with 2 len(sigmas) - 3 evaluations.

    Args:
        denoise: evaluates the model.
        noise: where the solution starts, but for the factor sigmas[0].
        sigmas: descending, the last one 0 (`noise_schedule`). With two, one evaluation makes the images.
    """
    x = sigmas[0] * noise
    for sigma, following in itertools.pairwise(sigmas):
        slope = (x - denoise(x, torch.full_like(x[:, 0, 0, 0], sigma))) / sigma
        ahead = x + (following - sigma) * slope
        if following:
            slope_ahead = (ahead - denoise(ahead, torch.full_like(x[:, 0, 0, 0], following))) / following
            ahead = x + (following - sigma) * (slope + slope_ahead) / 2
        x = ahead
    return x
