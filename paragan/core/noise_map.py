"""Noisy images with the strength of their noise as one more channel, for a D that judges both."""

import torch
from torch import Tensor


def with_noise_map(x: Tensor, sigma: Tensor) -> Tensor:
    """Append the standard deviation of the noise [N] to images [N, C, H, W] as a map: [N, C + 1, H, W]."""
    return torch.cat([x, sigma[:, None, None, None].to(x.dtype).expand(-1, 1, *x.shape[2:])], 1)


def split_noise_map(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return images [N, C, H, W] and the standard deviations [N] from [N, C + 1, H, W]."""
    return x[:, :-1], x[:, -1, 0, 0]
