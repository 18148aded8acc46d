"""Layers with an equalized learning rate: weights start from N(0, 1) and are scaled in every forward pass.

Karras et al., "Progressive Growing of GANs", 2018, section 4.1: with Adam, whose steps do not depend on the scale of a
gradient, all layers then learn at the same relative rate.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAKY_RELU_SLOPE = 0.2
LEAKY_RELU_GAIN = math.sqrt(2)  # keeps the variance, but for the slope (He et al. 2015)


def leaky_relu(x: Tensor) -> Tensor:
    """Compute sqrt(2) leaky_relu(x) with a slope of 0.2."""
    return F.leaky_relu(x, LEAKY_RELU_SLOPE) * LEAKY_RELU_GAIN


class EqualizedLinear(nn.Module):
    """[N, a] -> [N, b].

    Args:
        inputs, outputs: a and b.
        bias: whether there is one.
        bias_start: its value at first.
        lr_multiplier: on the learning rate of this layer.
    """

    def __init__(self, inputs: int, outputs: int, bias: bool = True, bias_start: float = 0, lr_multiplier: float = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / lr_multiplier)
        self.bias = nn.Parameter(torch.full((outputs,), bias_start / lr_multiplier)) if bias else None
        self.weight_gain = lr_multiplier / math.sqrt(inputs)
        self.bias_gain = lr_multiplier

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias * self.bias_gain
        return F.linear(x, self.weight * self.weight_gain, bias)


class EqualizedEmbedding(nn.Embedding):
    """int64 [N] -> [N, length]: as a linear layer of `length` inputs has its rows scaled."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / math.sqrt(self.embedding_dim)


class EqualizedConv(nn.Conv2d):
    """[N, a, H, W] -> [N, b, H', W'], with the arguments of `nn.Conv2d`."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, bias: bool = True):
        super().__init__(inputs, outputs, kernel, stride, padding, bias=bias)
        nn.init.normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        self.weight_gain = 1 / math.sqrt(inputs * kernel**2)

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight * self.weight_gain, self.bias)


def equalized(layer: nn.Linear | nn.Embedding) -> nn.Module:
    """Return a layer of the same shape with an equalized learning rate."""
    if isinstance(layer, nn.Embedding):
        return EqualizedEmbedding(layer.num_embeddings, layer.embedding_dim)
    return EqualizedLinear(layer.in_features, layer.out_features, bias=layer.bias is not None)
