"""Images of several levels, each with its own part of noise (Hyun et al. 2025, "Scalable GANs with Transformers").

    a_k x_k + sqrt(1 - a_k^2) e_k        e_k standard normal;  a_1 < ... < a_K = 1, growing exponentially

G makes an image x_k after each part of its layers, and of a real x_k = x. Early parts are thus judged by what is seen
through much noise, and D cannot compare the levels of a fake.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paragan.core.rng import LaneRng


def signal_fractions(levels: int, least: float) -> Tensor:
    """Return a_1 to a_K: from `least` to 1 in equal ratios, [K]."""
    return least ** (1 - torch.arange(levels) / max(1, levels - 1))


def add_noise_by_level(levels: Tensor, least: float, rng: LaneRng, stream: str) -> Tensor:
    """Add noise to the images of all levels, and put them side by side.

    Args:
        levels: [N, K, C, H, W].
        least: a_1.
        rng: of the N rows.
        stream: name of the random stream.

    Returns:
        [N, K C, H, W].
    """
    signal = signal_fractions(levels.shape[1], least).to(levels)[:, None, None, None]
    noise = rng.normal(stream, *levels.shape[1:]).to(levels.dtype)
    return (signal * levels + (1 - signal.square()).sqrt() * noise).flatten(1, 2)
