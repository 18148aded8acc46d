"""Convolutions whose input channels are scaled by a style (Karras et al. 2020, "StyleGAN2", section 2.2).

    s = A(w)                    a scale for every input channel, from the style w by an affine layer
    w'_ijk  = s_i w_ijk                                              (eq. 1, modulation)
    w''_ijk = w'_ijk / sqrt(sum_ik w'_ijk^2 + eps)                    (eq. 3, demodulation)

Two forms compute the same: `scale` multiplies the input by s, convolves all rows with one weight, and divides the
output; `group` makes a weight for each row and convolves all rows at once as groups, as in the paper's appendix B.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.equalized import EqualizedLinear
from paragan.nets.fir_resample import FIRFilter
from paragan.nets.grouped_conv import grouped_conv

ModulationForm = Literal["scale", "group"]
EPSILON = 1e-8


class ModulatedConv(nn.Module):
    """x [N, a, H, W], style w [N, style] -> [N, b, H, W], with `up` [N, b, 2 H, 2 W].

    Args:
        inputs, outputs: a and b.
        kernel: side of the kernel.
        style: length of w.
        up: whether the map is doubled: a transposed convolution of stride 2, then smoothing.
        demodulate: whether eq. 3 is used; without it the weight is scaled by its number of inputs.
        form: of the computation.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int,
        style: int,
        up: bool = False,
        demodulate: bool = True,
        form: ModulationForm = "scale",
    ):
        super().__init__()
        self.up, self.demodulate, self.form = up, demodulate, form
        self.affine = EqualizedLinear(style, inputs, bias_start=1)
        self.weight = nn.Parameter(torch.randn(outputs, inputs, kernel, kernel))
        self.style_gain = 1.0 if demodulate else 1 / math.sqrt(inputs * kernel**2)
        self.fir = FIRFilter() if up else None

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):  # styles and norms of weights in full precision
            style = self.affine(w.to(self.weight.dtype)) * self.style_gain
            norm = self._inverse_norm(style) if self.demodulate else None
        y = self._group(x, style, norm) if self.form == "group" else self._scale(x, style, norm)
        return y if self.fir is None else self.fir.smooth(4 * y, padding=1)

    def _inverse_norm(self, style: Tensor) -> Tensor:
        """Return 1 / sqrt(sum_ik w'_ijk^2 + eps) [N, b]: the squares of the weight are summed over its pixels first."""
        squares = self.weight.square().sum((2, 3))
        return (style.square() @ squares.T + EPSILON).rsqrt()

    def _scale(self, x: Tensor, style: Tensor, norm: Tensor | None) -> Tensor:
        x = x * style[:, :, None, None].to(x.dtype)
        padding = self.weight.shape[2] // 2
        if self.up:
            y = F.conv_transpose2d(x, self.weight.transpose(0, 1), stride=2)
        else:
            y = F.conv2d(x, self.weight, padding=padding)
        return y if norm is None else y * norm[:, :, None, None].to(y.dtype)

    def _group(self, x: Tensor, style: Tensor, norm: Tensor | None) -> Tensor:
        rows = len(x)
        weight = self.weight * style[:, None, :, None, None]
        if norm is not None:
            weight = weight * norm[:, :, None, None, None]
        x = x.reshape(1, -1, *x.shape[2:])
        if self.up:
            y = F.conv_transpose2d(x, weight.transpose(1, 2).flatten(0, 1), stride=2, groups=rows)
        else:
            y = grouped_conv(x, weight.flatten(0, 1), padding=weight.shape[-1] // 2, groups=rows)
        return y.view(rows, -1, *y.shape[2:])
