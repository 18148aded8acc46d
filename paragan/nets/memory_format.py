"""Keep one memory format (contiguous or channels_last) throughout a network.

Weights carry the format, and feature maps take it over from them. Three places lose it: vectors reshaped to maps, maps
flattened to vectors, and images of one channel, whose strides fit both formats. There a `MemoryFormat` layer restores
it. Operations on maps of two formats take many times as long (the gradient of a leaky ReLU on a CPU: 31 times), and
convolutions copy such maps first. `set_memory_format` sets the format of a network.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.resample import DownConv, UpConv


class MemoryFormat(nn.Module):
    """[N, C, H, W] -> the same values in the network's memory format."""

    memory_format: torch.memory_format = torch.contiguous_format

    def forward(self, x: Tensor) -> Tensor:
        return to_memory_format(x, self.memory_format)


class UnflattenGrid(MemoryFormat):
    """[N, C * H * W] -> [N, C, H, W] for a grid of (H, W)."""

    def __init__(self, grid: tuple[int, int]):
        super().__init__()
        self.grid = grid

    def forward(self, x: Tensor) -> Tensor:
        return to_memory_format(x.unflatten(1, (-1, *self.grid)), self.memory_format)


class FlattenCL(MemoryFormat):
    """[N, C, H, W] -> [N, C * H * W]; the gradient gets the network's memory format too."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and self.memory_format is torch.channels_last:
            x.register_hook(lambda grad: to_memory_format(grad, torch.channels_last))
        return x.flatten(1)


def to_memory_format(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return x in a memory format, with strides that show it.

    One channel is contiguous in both formats at once, and torch then guesses: its strides are set explicitly.
    """
    if memory_format is torch.channels_last and x.shape[1] == 1:
        n, _, h, w = x.shape
        return x.reshape(n, h, w, 1).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=memory_format)


@torch.no_grad()
def set_memory_format(net: nn.Module, memory_format: torch.memory_format) -> None:
    """Convert the 4D parameters and buffers of `net`, and set the format of its `MemoryFormat` layers."""
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.dim() == 4:
            tensor.data = torch.empty_like(tensor, memory_format=memory_format).copy_(tensor)
    for module in net.modules():
        if isinstance(module, MemoryFormat):
            module.memory_format = memory_format


def pad_channels(net: nn.Module, tile: int) -> None:
    """Run every plain convolution of `net` with its channels zero-padded to a multiple of `tile`.

    Some kernels are faster so. Parameters keep their shapes: padding happens in each forward.
    """
    for layer in net.modules():
        if not isinstance(layer, nn.Conv2d):
            continue
        layer.__dict__.pop("_conv_forward", None)  # of an earlier training
        if tile <= 1:
            continue
        plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer, UpConv | DownConv)
        if plain and (layer.in_channels % tile or layer.out_channels % tile):
            layer.__dict__["_conv_forward"] = partial(_padded_conv, layer, tile)


def _padded_conv(layer: nn.Conv2d, tile: int, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    extra_in = -layer.in_channels % tile
    extra_out = -layer.out_channels % tile
    input = F.pad(input, (0, 0, 0, 0, 0, extra_in))
    weight = F.pad(weight, (0, 0, 0, 0, 0, extra_in, 0, extra_out))
    bias = None if bias is None else F.pad(bias, (0, extra_out))
    output = F.conv2d(input, weight, bias, layer.stride, layer.padding, layer.dilation)
    return output[:, : layer.out_channels]
