"""The residual networks that SNGAN, SAGAN, BigGAN and ContraGAN have in common; a family says how wide."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paragan.nets.attention import insert_attention
from paragan.nets.conditioning import DConditioningKind, GConditioningKind, d_input, g_input
from paragan.nets.discriminator_heads import make_head
from paragan.nets.lane_batch_norm import LaneBatchNorm2d, batch_norm
from paragan.nets.layers import LayerFactory, maybe_checkpoint
from paragan.nets.memory_format import MemoryFormat, Unflatten4x4
from paragan.nets.spec import Spec


class ResidualGenerator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, R, R] in [-1, 1], dtype of z. No classes: y unused.

    conditions: (z, y) -> what `start` sees, and what the norms of each block see (`nets/conditioning.py`)
    start     : to [N, channels of the first block * 4 * 4]
    widths    : channels after the last block, and of the image
    again     : activations inside blocks are computed again in backward, not kept
    """

    def __init__(
        self,
        latent: int,
        conditions: nn.Module,
        start: nn.Module,
        blocks: Iterable[nn.Module],
        widths: tuple[int, int],
        layers: LayerFactory,
        checkpointing: bool,
    ):
        super().__init__()
        self.latent, self.checkpointing = latent, checkpointing
        self.conditions, self.start, self.unflatten = conditions, start, Unflatten4x4()
        self.blocks = nn.ModuleList(blocks)
        self.norm = LaneBatchNorm2d(widths[0])  # without classes, as in all the authors' codes
        self.image = layers.conv(*widths, 3)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        first, each = self.conditions(z, y)
        h = self.unflatten(self.start(first))
        for block, seen in zip(self.blocks, each):
            h = maybe_checkpoint(block, self.checkpointing, h, seen)
        return maybe_checkpoint(self._to_image, self.checkpointing, h).to(z.dtype)

    def _to_image(self, h: Tensor) -> Tensor:
        return torch.tanh(self.image(F.relu(self.norm(h), inplace=True)))


class ResidualDiscriminator(nn.Module):
    """Images [N, C, R, R], y int64 [N] -> logits [N], float32 or wider, or what the head says. No classes: y unused.

    shown: (images, y) -> what the first block sees
    head : (features [N, F], y) -> the verdict; features are sums over pixels
    again: activations inside blocks are computed again in backward, not kept
    """

    def __init__(self, label_map: nn.Module, blocks: Iterable[nn.Module], head: nn.Module, checkpointing: bool):
        super().__init__()
        self.checkpointing, self.label_map, self.input_format = checkpointing, label_map, MemoryFormat()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.input_format(self.label_map(x, y))
        for block in self.blocks:
            h = maybe_checkpoint(block, self.checkpointing, h)
        return self.head(F.relu(h, inplace=True).sum((2, 3)), y)


class UpBlock(nn.Module):
    """[N, a, R, R] -> [N, b, 2 R, 2 R]: norm, ReLU, up, conv, norm, ReLU, conv, plus a 1x1 shortcut.

    norm: channels -> a batch norm, called with what the norms of this block see.
    """

    def __init__(self, a: int, b: int, norm: Callable[[int], nn.Module], layers: LayerFactory):
        super().__init__()
        self.norm1, self.norm2 = norm(a), norm(b)
        self.conv1 = layers.up(a, b, 3, layers.residual_gain)
        self.conv2 = layers.conv(b, b, 3, layers.residual_gain)
        self.shortcut = layers.up(a, b, 1)

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x, condition), inplace=True))
        h = self.conv2(F.relu(self.norm2(h, condition), inplace=True))
        return h + self.shortcut(x)


class DownBlock(nn.Module):
    """[N, a, R, R] -> [N, b, R / 2, R / 2], or R without `down`: ReLU, conv, ReLU, conv, pool; a shortcut.

    `before` is the first ReLU, but nothing where the input is an image (the authors' "optimized block").
    `hidden` are the channels between the two convolutions. `activated`: the shortcut sees the ReLU too.
    """

    def __init__(
        self,
        first_activation: nn.Module,
        a: int,
        hidden: int,
        b: int,
        down: bool,
        layers: LayerFactory,
        relu_shortcut: bool = False,
    ):
        super().__init__()
        self.first_activation, self.relu_shortcut = first_activation, relu_shortcut
        last = layers.down if down else layers.conv
        self.conv1 = layers.conv(a, hidden, 3, layers.residual_gain)
        self.conv2 = last(hidden, b, 3, layers.residual_gain)
        self.shortcut = last(a, b, 1) if down or a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        seen = self.first_activation(x)
        h = self.conv2(F.relu(self.conv1(seen), inplace=True))
        return h + self.shortcut(seen if self.relu_shortcut else x)


def g_blocks(
    widths: Sequence[int], norm: Callable[[int], nn.Module], attention: int, layers: LayerFactory
) -> Iterable[nn.Module]:
    """A generator's blocks from 4x4 up, of `widths` at 4x4, 8x8, ...; attention at so many pixels (0: none)."""
    pairs = enumerate(itertools.pairwise(widths))
    return insert_attention(((UpBlock(a, b, norm, layers), 8 << i, b) for i, (a, b) in pairs), attention, layers)


def build_generator(
    spec: Spec,
    widths: Sequence[int],
    latent: int,
    kind: GConditioningKind,
    attention: int,
    layers: LayerFactory,
    checkpointing: bool,
) -> ResidualGenerator:
    """Of SNGAN and SAGAN: every norm has a gain and a bias per class of its own; widths at 4x4, 8x8, ..."""
    conditions = g_input(kind, latent, spec.classes)
    start = layers(nn.Linear(conditions.out_features, widths[0] * 4 * 4))
    norm = partial(batch_norm, classes=spec.classes if kind == "batch_norm" else 0)
    blocks = g_blocks(widths, norm, attention, layers)
    return ResidualGenerator(latent, conditions, start, blocks, (widths[-1], spec.channels), layers, checkpointing)


def build_discriminator(
    spec: Spec,
    stages: Sequence[tuple[int, bool]],
    block_width: Literal["in", "out"],
    kind: DConditioningKind,
    attention: int,
    layers: LayerFactory,
    checkpointing: bool,
    shortcut: Literal["input", "activated"],
    embedding_length: int | None = None,
) -> ResidualDiscriminator:
    """Of all four. stages: (channels, halves?) of each block; length: of a contrastive embedding."""
    first = d_input(kind, spec.classes)
    falling = _d_blocks(
        spec.resolution, spec.channels + first.extra_channels, stages, block_width, layers, shortcut == "activated"
    )
    blocks = list(insert_attention(falling, attention, layers))
    return ResidualDiscriminator(
        first, blocks, make_head(kind, stages[-1][0], spec.classes, layers, embedding_length), checkpointing
    )


def _d_blocks(
    size: int,
    in_channels: int,
    stages: Sequence[tuple[int, bool]],
    block_width: Literal["in", "out"],
    layers: LayerFactory,
    relu_shortcut: bool,
) -> Iterable[tuple[nn.Module, int, int]]:
    for i, (b, down) in enumerate(stages):
        size = size // 2 if down else size
        before, between = (nn.ReLU(), in_channels if block_width == "in" else b) if i else (nn.Identity(), b)
        yield DownBlock(before, in_channels, between, b, down, layers, relu_shortcut), size, b
        in_channels = b
