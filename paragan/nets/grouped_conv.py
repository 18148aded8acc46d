"""Grouped convolutions with a fast second derivative, which R1 and R2 need of D.

Torch computes the second derivative of a grouped convolution group by group; for a depthwise convolution these are
hundreds of convolutions of one channel. A convolution is linear in its input and in its weight, so its second
derivative can be computed by the same three operations for all groups at once (as in NVIDIA's `conv2d_gradfix`, Karras
et al. 2020). Let y = C(x, w), let X(g, w) be the gradient with respect to the input, and W(g, x) the gradient with
respect to the weight. Given the gradients dx and dw with respect to X and W:

    gradient of g: C(dx, w) + C(x, dw)        of x: X(g, dw)        of w: W(g, dx)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

aten = torch.ops.aten
# Arguments of aten.convolution from stride to groups.
ConvArgs = tuple[list[int], list[int], list[int], bool, list[int], int]


class GroupedConv(nn.Conv2d):
    """`nn.Conv2d` with zero padding, for many groups."""

    def forward(self, input: Tensor) -> Tensor:
        return grouped_conv(input, self.weight, self.bias, self.stride[0], int(self.padding[0]), self.groups)


def grouped_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1, padding: int = 0, groups: int = 1
) -> Tensor:
    """Compute `F.conv2d`: bit-equal output and gradient; the second derivative is equal up to rounding.

    In a compiled network this is `F.conv2d` itself.
    """
    if torch.compiler.is_compiling():  # compiled networks are not differentiated twice
        return F.conv2d(x, weight, bias, stride, padding, 1, groups)
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    conv_args = ([stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups)
    return _GroupedConvFunction.apply(x, weight, bias, conv_args)  # pyright: ignore[reportReturnType]


class _GroupedConvFunction(torch.autograd.Function):
    """y = C(x, w) + b."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, conv_args: ConvArgs) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conv_args = conv_args
        return aten.convolution(x, weight, bias, *conv_args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output_mask = list(ctx.needs_input_grad[:3])
        gradients: Any = _ConvGradients.apply(grads[0], *ctx.saved_tensors, ctx.conv_args, output_mask)
        return *gradients, None


class _ConvGradients(torch.autograd.Function):
    """X(g, w), W(g, x) and the gradient of the bias, those that `output_mask` selects."""

    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, conv_args: ConvArgs, output_mask: list[bool]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(g, x, weight)
        ctx.conv_args = conv_args
        ctx.set_materialize_grads(False)
        return aten.convolution_backward(g, x, weight, [g.shape[1]], *conv_args, output_mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        g, x, weight = ctx.saved_tensors
        dx, dw, db = grads
        terms = []
        if dx is not None:
            terms.append(aten.convolution(dx, weight, None, *ctx.conv_args))
        if dw is not None:
            terms.append(aten.convolution(x, dw, None, *ctx.conv_args))
        if db is not None:
            terms.append(db[:, None, None].expand_as(g))
        g_grad = sum(terms[1:], terms[0]) if terms else None
        x_grad = None if dw is None else _conv_gradient(0, g, x, dw, ctx.conv_args)
        weight_grad = None if dx is None else _conv_gradient(1, g, dx, weight, ctx.conv_args)
        return g_grad, x_grad, weight_grad, None, None


def _conv_gradient(index: int, g: Tensor, x: Tensor, weight: Tensor, conv_args: ConvArgs) -> Tensor:
    """Return the gradient of the input (`index` 0) or of the weight (1); of that tensor only the shape is used."""
    return aten.convolution_backward(g, x, weight, None, *conv_args, [index == 0, index == 1, False])[index]
