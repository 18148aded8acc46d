"""Resampling by 2 with a [1, 3, 3, 1] filter, as StyleGAN2's networks use it (Karras et al. 2020, appendix B).

Runs in float32 on CPUs, where depthwise convolutions in bf16 take many times as long (nets/r3gan.py), and by
`grouped_conv`, whose second derivative is fast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.grouped_conv import grouped_conv


class FIRFilter(nn.Module):
    """Smooths and resamples maps [N, C, H, W] with zeros beyond the edge; every channel alone."""

    kernel: Tensor

    def __init__(self) -> None:
        super().__init__()
        row = torch.tensor([1.0, 3.0, 3.0, 1.0]) / 8
        self.register_buffer("kernel", (row[:, None] * row)[None, None], persistent=False)

    def upsample(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, 2 H, 2 W]."""
        wide, kernel = self._widened(x)
        with torch.autocast(x.device.type, enabled=False):
            return F.conv_transpose2d(wide, 4 * kernel, None, 2, 1, 0, groups=len(kernel)).to(x.dtype)

    def downsample(self, x: Tensor) -> Tensor:
        """[N, C, H, W] -> [N, C, H / 2, W / 2]."""
        return self._smooth(x, stride=2, padding=1)

    def smooth(self, x: Tensor, padding: int) -> Tensor:
        """[N, C, H, W] -> [N, C, H + 2 padding - 3, W + 2 padding - 3]."""
        return self._smooth(x, stride=1, padding=padding)

    def _smooth(self, x: Tensor, stride: int, padding: int) -> Tensor:
        wide, kernel = self._widened(x)
        with torch.autocast(x.device.type, enabled=False):
            return grouped_conv(wide, kernel, None, stride, padding, groups=len(kernel)).to(x.dtype)

    def _widened(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x and the kernel of each channel, [C, 1, 4, 4], in the dtype to compute in."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32)) if x.device.type == "cpu" else x
        return wide, self.kernel.expand(x.shape[1], 1, 4, 4).to(wide.dtype)
