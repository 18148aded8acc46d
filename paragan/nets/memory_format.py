"""Where numbers become maps, maps numbers, and grey images maps: the layout of a network has to be told there.

Elsewhere a map has the layout of its neighbours. Operations on two maps of different layouts take many times as long (a
leaky ReLU's gradient on a CPU: 15 times), and convolutions copy them first. `lay` tells a network its layout.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.resample import DownConv, UpConv


class MemoryFormat(nn.Module):
    """[N, C, H, W] as it is, but laid out as the network's weights are."""

    memory_format: torch.memory_format = torch.contiguous_format

    def forward(self, x: Tensor) -> Tensor:
        return to_memory_format(x, self.memory_format)


class Unflatten4x4(MemoryFormat):
    """[N, C * 16] -> [N, C, 4, 4]."""

    def forward(self, x: Tensor) -> Tensor:
        return to_memory_format(x.unflatten(1, (-1, 4, 4)), self.memory_format)


class FlattenCL(MemoryFormat):
    """[N, C, H, W] -> [N, C * H * W]; the gradient, too, is laid out as the network's weights are."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and self.memory_format is torch.channels_last:
            x.register_hook(lambda slope: to_memory_format(slope, torch.channels_last))
        return x.flatten(1)


def to_memory_format(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """x in this layout, and so that strides tell: one channel is laid out both ways at once, and torch then guesses."""
    if memory_format is torch.channels_last and x.shape[1] == 1:
        n, _, h, w = x.shape
        return x.reshape(n, h, w, 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=memory_format)


@torch.no_grad()
def set_memory_format(net: nn.Module, memory_format: torch.memory_format) -> None:
    """Weights and buffers of convolutions in this layout, and all that follows from it."""
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.dim() == 4:
            tensor.data = torch.empty_like(tensor, memory_format=memory_format).copy_(tensor)
    for part in net.modules():
        if isinstance(part, MemoryFormat):
            part.memory_format = memory_format


def pad_channels(net: nn.Module, tile: int) -> None:
    """Fill up the channels of every plain convolution of `net` to a multiple of `tile`."""
    convolutions = (layer for layer in net.modules() if isinstance(layer, nn.Conv2d))
    for layer in convolutions if tile > 1 else ():
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer, UpConv | DownConv)
        if plain and (layer.in_channels % tile or layer.out_channels % tile):
            layer.__dict__["_conv_forward"] = partial(_padded_conv, layer, tile)


def _padded_conv(layer: nn.Conv2d, tile: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    more_in, more_out = -layer.in_channels % tile, -layer.out_channels % tile
    input = F.pad(input, (0, 0, 0, 0, 0, more_in))
    weight = F.pad(weight, (0, 0, 0, 0, 0, more_in, 0, more_out))
    bias = None if bias is None else F.pad(bias, (0, more_out))
    made = F.conv2d(input, weight, bias, layer.stride, layer.padding, layer.dilation)
    return made[:, : layer.out_channels]
