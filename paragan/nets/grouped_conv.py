"""Grouped convolutions whose gradient is differentiated in one piece, as R1 and R2 do with D's.

Torch computes what the second derivative wants of a grouped convolution one group after the other, which for a
depthwise one means hundreds of convolutions of one channel. A convolution is linear in its input and in its weight, so
that all of it can be written with the same three operations, for all groups at once (NVIDIA's `conv2d_gradfix`, Karras
et al. 2020, does the same): with y = C(x, w), the gradient of its input X(g, w) and of its weight W(g, x),

    towards g: C(dx, w) + C(x, dw)        towards x: X(g, dw)        towards w: W(g, dx)

where dx and dw come from whatever used X and W.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten
ConvArgs = tuple[
    list[int], list[int], list[int], bool, list[int], int
]  # stride ... groups, as aten.convolution takes them


class GroupedConv(nn.Conv2d):
    """`nn.Conv2d`, padded by zeros, for many groups."""

    def forward(self, input: Tensor) -> Tensor:
        return grouped_conv(input, self.weight, self.bias, self.stride[0], int(self.padding[0]), self.groups)


def grouped_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, groups: int = 1
) -> Tensor:
    """`F.conv2d` and its gradient to the bit; what is differentiated twice, up to rounding. Compiled, it is torch's."""
    if torch.compiler.is_compiling():  # such a network is not differentiated twice
        return F.conv2d(x, weight, bias, stride, padding, 1, groups)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    how = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    return _GroupedConvFunction.apply(x, weight, bias, how)  # pyright: ignore[reportReturnType]


class _GroupedConvFunction(torch.autograd.Function):
    """y = C(x, w) + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv_args: ConvArgs) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = conv_args
        return aten.convolution(x, weight, bias, *conv_args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:3])
        return *_ConvGradients.apply(grads[0], *ctx.saved_tensors, ctx.how, wanted), None  # pyright: ignore[reportGeneralTypeIssues]


class _ConvGradients(torch.autograd.Function):
    """X(g, w), W(g, x) and the bias's, those that are wanted."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, conv_args: ConvArgs, output_mask: list[bool]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(g, x, weight)
        ctx.how = conv_args
        ctx.set_materialize_grads(False)
        return aten.convolution_backward(g, x, weight, [g.shape[1]], *conv_args, output_mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (g, x, weight), how, (dx, dw, db) = ctx.saved_tensors, ctx.how, grads
        parts = []
        if dx is not None:
            parts.append(aten.convolution(dx, weight, None, *how))
        if dw is not None:
            parts.append(aten.convolution(x, dw, None, *how))
        if db is not None:
            parts.append(db[:, None, None].expand_as(g))
        to_g = sum(parts[1:], parts[0]) if parts else None
        to_x = None if dw is None else _gradient(0, g, x, dw, how)
        to_weight = None if dx is None else _gradient(1, g, dx, weight, how)
        return to_g, to_x, to_weight, None, None


def _gradient(which: int, g: Tensor, x: Tensor, weight: Tensor, conv_args: ConvArgs) -> Tensor:
    """Of the input (0) or of the weight (1); what the other is gives no more than a shape."""
    return aten.convolution_backward(g, x, weight, None, *conv_args, [which == 0, which == 1, False])[which]
