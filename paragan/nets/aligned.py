"""Convolutions whose channels are filled up with zeros to what a device multiplies at once.

The same function of the same parameters up to rounding, under the same names: zeros are put beside image and weight on
the way into the product, and cut off behind it. For images of 1 or 3 channels; others are multiples of a tile anyway.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.resample import DownConv, UpConv


def align(net: nn.Module, tile: int) -> None:
    """Fill up the channels of every plain convolution of `net` to a multiple of `tile`."""
    convolutions = (layer for layer in net.modules() if isinstance(layer, nn.Conv2d))
    for layer in convolutions if tile > 1 else ():
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer, UpConv | DownConv)
        if plain and (layer.in_channels % tile or layer.out_channels % tile):
            layer.__dict__["_conv_forward"] = partial(_filled, layer, tile)


def _filled(layer: nn.Conv2d, tile: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    more_in, more_out = -layer.in_channels % tile, -layer.out_channels % tile
    input = F.pad(input, (0, 0, 0, 0, 0, more_in))
    weight = F.pad(weight, (0, 0, 0, 0, 0, more_in, 0, more_out))
    bias = None if bias is None else F.pad(bias, (0, more_out))
    made = F.conv2d(input, weight, bias, layer.stride, layer.padding, layer.dilation)
    return made[:, : layer.out_channels]
