"""A small U-net for images with noise of a known level, with residual blocks as in DDPM++ and self-attention.

Ho, Jain and Abbeel 2020; Song et al. 2021; Dhariwal and Nichol 2021: the level (and the class) scale and shift the maps
of every block. Residual branches start at 0.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.attention import dot_product_attention
from paragan.nets.layers import group_norm

RESIDUAL_GAIN = 0.5**0.5  # keeps the variance of a sum
MAX_PERIOD = 10_000.0


class UNet(nn.Module):
    """x [N, C, H, W], level [N], y int64 [N] -> [N, out, H, W]. Without classes y is ignored.

    Args:
        channels: C.
        out_channels: of the output.
        widths: channels at image resolution, half of it, ...
        blocks: residual blocks at every resolution on the way down; one more on the way up.
        attention: at how many of the lowest resolutions there is self-attention.
        classes: 0: unconditional.
    """

    def __init__(
        self, channels: int, out_channels: int, widths: Sequence[int], blocks: int, attention: int, classes: int
    ):
        super().__init__()
        embedding = 4 * widths[0]
        self.feature_channels = widths[-1]
        self.embedding = LevelEmbedding(widths[0], embedding, classes)
        self.start = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skipped = [widths[0]]  # channels of the maps that skip connections take to the way up
        for number, width in enumerate(widths):
            attends = len(widths) - number <= attention
            if number:
                self.down.append(ResidualBlock(skipped[-1], skipped[-1], embedding, scale=0.5))
                skipped.append(skipped[-1])
            for _ in range(blocks):
                self.down.append(ResidualBlock(skipped[-1], width, embedding, attends))
                skipped.append(width)
        self.middle = ResidualBlock(widths[-1], widths[-1], embedding, attends=attention > 0)
        width_now = widths[-1]
        for number, width in reversed(list(enumerate(widths))):
            attends = len(widths) - number <= attention
            for _ in range(blocks + 1):
                self.up.append(ResidualBlock(width_now + skipped.pop(), width, embedding, attends))
                width_now = width
            if number:
                self.up.append(ResidualBlock(width, width, embedding, scale=2.0))
        self.norm = group_norm(widths[0])
        self.end = _zeroed(nn.Conv2d(widths[0], out_channels, 3, padding=1))

    def forward(self, x: Tensor, level: Tensor, y: Tensor | None = None) -> Tensor:
        return self.with_features(x, level, y)[0]

    def with_features(self, x: Tensor, level: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output, and the maps [N, widths[-1], h, w] at the lowest resolution."""
        embedding = self.embedding(level, y)
        maps = [self.start(x)]
        for block in self.down:
            maps.append(block(maps[-1], embedding))
        h = features = self.middle(maps[-1], embedding)
        for block in self.up:
            h = block(h if block.scale == 2 else torch.cat([h, maps.pop()], 1), embedding)
        return self.end(F.silu(self.norm(h))), features


class LevelEmbedding(nn.Module):
    """Noise level [N] and class int64 [N] -> [N, outputs]: sines and cosines, and two linear layers."""

    rates: Tensor

    def __init__(self, width: int, outputs: int, classes: int):
        super().__init__()
        rates = MAX_PERIOD ** -(torch.arange(width // 2) / (width // 2))
        self.register_buffer("rates", rates, persistent=False)
        self.first = nn.Linear(2 * (width // 2), outputs)
        self.second = nn.Linear(outputs, outputs)
        self.classes = nn.Embedding(classes, outputs) if classes else None

    def forward(self, level: Tensor, y: Tensor | None) -> Tensor:
        angles = level[:, None] * self.rates.to(level.dtype)
        h = self.second(F.silu(self.first(torch.cat([angles.cos(), angles.sin()], 1))))
        if self.classes is not None:
            assert y is not None
            h = h + self.classes(y).to(h.dtype)
        return F.silu(h)


class ResidualBlock(nn.Module):
    """x [N, a, H, W], embedding [N, E] -> [N, b, ...]: two 3x3 convolutions beside a shortcut, and self-attention.

    Args:
        inputs, outputs: a and b.
        embedding: E.
        attends: whether attention follows.
        scale: of the sides: 0.5, 1 or 2.
    """

    def __init__(self, inputs: int, outputs: int, embedding: int, attends: bool = False, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.first_norm = group_norm(inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.affine = nn.Linear(embedding, 2 * outputs)
        self.second_norm = group_norm(outputs)
        self.second = _zeroed(nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attention = MapAttention(outputs) if attends else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.first(self._resample(F.silu(self.first_norm(x))))
        scale, shift = self.affine(embedding)[:, :, None, None].chunk(2, dim=1)
        h = self.second(F.silu(self.second_norm(h) * (1 + scale) + shift))
        return self.attention((self.shortcut(self._resample(x)) + h) * RESIDUAL_GAIN)

    def _resample(self, x: Tensor) -> Tensor:
        if self.scale == 1:
            return x
        return F.avg_pool2d(x, 2) if self.scale < 1 else F.interpolate(x, scale_factor=2.0, mode="nearest")


class MapAttention(nn.Module):
    """[N, C, H, W] -> the same shape: self-attention of one head between pixels, added to the input."""

    def __init__(self, channels: int):
        super().__init__()
        self.norm = group_norm(channels)
        self.inputs = nn.Conv2d(channels, 3 * channels, 1)
        self.output = _zeroed(nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inputs(self.norm(x)).flatten(2).mT.contiguous()[:, None]  # [N, 1, HW, 3 C]
        queries, keys, values = rows.chunk(3, dim=3)
        attended = dot_product_attention(queries / math.sqrt(x.shape[1]), keys, values)
        return (x + self.output(attended[:, 0].mT.unflatten(2, x.shape[2:]))) * RESIDUAL_GAIN


def _zeroed(layer: nn.Conv2d) -> nn.Conv2d:
    nn.init.zeros_(layer.weight)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer
