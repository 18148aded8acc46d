"""Convolutions fused with the up- or downsampling next to them.

Each is the same function of the same parameters, up to rounding. A 1x1 convolution commutes with nearest upsampling and
with average pooling, so it runs at the lower resolution, on a quarter of the pixels. A 3x3 convolution after upsampling
or before pooling equals one 4x4 convolution of stride 2 (2.25 times fewer products; measured twice as fast on CPUs,
forward and backward).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UpConv(nn.Conv2d):
    """Nearest upsampling, then a 3x3 (padding 1) or 1x1 convolution: [N, a, H, W] -> [N, b, 2 H, 2 W].

    With `fused_resampling` False the two operations run one after the other.
    """

    fused_resampling: bool = True

    def forward(self, input: Tensor) -> Tensor:
        if not self.fused_resampling:
            return super().forward(upsample_nearest(input))
        if self.kernel_size == (1, 1):
            return upsample_nearest(super().forward(input))
        channels_last = self.weight.is_contiguous(memory_format=torch.channels_last)
        memory_format = torch.channels_last if channels_last else torch.contiguous_format  # transposing would lose it
        kernel = self.weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=memory_format)
        return F.conv_transpose2d(input, _sum_shifted_kernels(kernel), self.bias, stride=2, padding=1)


class DownConv(nn.Conv2d):
    """A 3x3 (padding 1) or 1x1 convolution, then 2x2 average pooling: [N, a, H, W] -> [N, b, H / 2, W / 2].

    With `fused_resampling` False the two operations run one after the other.
    """

    fused_resampling: bool = True

    def forward(self, input: Tensor) -> Tensor:
        if not self.fused_resampling:
            return F.avg_pool2d(super().forward(input), 2)
        if self.kernel_size == (1, 1):
            return super().forward(F.avg_pool2d(input, 2))
        return F.conv2d(input, _sum_shifted_kernels(self.weight) / 4, self.bias, stride=2, padding=1)


def upsample_nearest(x: Tensor) -> Tensor:
    """Upsample [N, C, H, W] -> [N, C, 2 H, 2 W], every pixel four times."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")


def _sum_shifted_kernels(weight: Tensor) -> Tensor:
    """[O, I, 3, 3] -> [O, I, 4, 4]: the kernel of a convolution followed by a sum over 2x2 pixels."""
    padded = F.pad(weight, (1, 1, 1, 1))
    rows = padded[:, :, 1:] + padded[:, :, :-1]
    return rows[..., 1:] + rows[..., :-1]
