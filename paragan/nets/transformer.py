"""Layers of vision transformers: tokens of patches, positions, attention and a gated MLP. Tokens are [N, T, C]."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.attention import dot_product_attention

MAX_PERIOD = 10_000.0  # of positions, in tokens (Vaswani et al. 2017)
NORM_EPSILON = 1e-6


class Attention(nn.Module):
    """[N, T, width] -> the same shape: attention of several heads between all tokens.

    Queries and keys are normalised by head (Henry et al. 2020), and rotated by the position of their token (Su et al.
    2021, "RoFormer").

    Args:
        width: of a token.
        heads: their number, a divisor of `width`.
        angles: [T, width / heads / 2] by which pairs of numbers are rotated (`rotation_angles`).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, heads: int, angles: Tensor):
        super().__init__()
        self.heads = heads
        self.inputs = linear(width, 3 * width)
        self.query_norm = RMSNorm(width // heads)
        self.key_norm = RMSNorm(width // heads)
        self.output = linear(width, width)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.inputs(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        queries, keys = self._rotate(self.query_norm(queries)), self._rotate(self.key_norm(keys))
        queries = queries / math.sqrt(queries.shape[-1])
        attended = dot_product_attention(queries.to(values.dtype), keys.to(values.dtype), values)
        return self.output(attended.transpose(1, 2).flatten(2))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate pairs of numbers of x [N, heads, T, C] by the angle of their token."""
        a, b = x.unflatten(3, (-1, 2)).unbind(4)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], 4).flatten(3)


class GatedMLP(nn.Module):
    """[N, T, width] -> the same shape: SwiGLU (Shazeer 2020), with 8/3 `width` inside: the parameters of a plain MLP
    with 4 `width`."""

    def __init__(self, width: int):
        super().__init__()
        inside = 8 * width // 3
        self.inputs = linear(width, 2 * inside)
        self.output = linear(inside, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.inputs(x).chunk(2, dim=2)
        return self.output(F.silu(gate) * value)


def linear(inputs: int, outputs: int, gain: float = 1.0) -> nn.Linear:
    """Return a linear layer, initialised by Glorot and Bengio 2010 (times `gain`) with a bias of 0."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight, gain=gain)
    nn.init.zeros_(layer.bias)
    return layer


class RMSNorm(nn.Module):
    """[..., C] -> the same shape: a mean square of 1 (Zhang and Sennrich 2019), times a learned gain."""

    def __init__(self, features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), NORM_EPSILON)


def rms_norm(x: Tensor) -> Tensor:
    """Scale tokens [N, T, C] to a mean square of 1."""
    return F.rms_norm(x, (x.shape[2],), eps=NORM_EPSILON)


def rotation_angles(grid: tuple[int, int], features: int) -> Tensor:
    """Return the angles [T, features / 2] of the tokens of a grid (height, width): half by the row, half by the column.

    Args:
        features: of a head, a multiple of 4.
    """
    rates = MAX_PERIOD ** -(torch.arange(features // 4) / (features // 4))
    rows, columns = grid_positions(grid)
    return torch.cat([rows[:, None] * rates, columns[:, None] * rates], 1)


def sine_positions(grid: tuple[int, int], width: int) -> Tensor:
    """Return sines and cosines of the rows and columns of a grid, [T, width]; `width` is a multiple of 4."""
    angles = rotation_angles(grid, width)
    return torch.cat([angles.sin(), angles.cos()], 1)


def grid_positions(grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return row and column [T] of every token of a grid (height, width), row by row."""
    height, width = grid
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return rows.flatten().float(), columns.flatten().float()


class ToPatches(nn.Module):
    """Images [N, C, H, W] -> tokens [N, T, width]: a linear map of every patch."""

    def __init__(self, channels: int, patch: int, width: int):
        super().__init__()
        self.patch = patch
        self.linear = linear(channels * patch**2, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.pixel_unshuffle(x, self.patch).flatten(2).mT)


def from_patches(x: Tensor, patch: int, grid: tuple[int, int]) -> Tensor:
    """Put patches [N, T, C patch^2] of a grid (height, width) together: [N, C, H, W]."""
    return F.pixel_shuffle(x.mT.unflatten(2, grid), patch)
