"""The residual networks that SNGAN, SAGAN, BigGAN and ContraGAN share.

All four are one generator and one discriminator with different parts: widths by resolution, norms, initial weights,
attention, and a head.
"""

import itertools
import math
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
from paragan.nets.memory_format import MemoryFormat, UnflattenGrid
from paragan.nets.spec import Spec, start_grid


class ResidualGenerator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, H, W] in [-1, 1], dtype of z. Without classes y is ignored.

    Args:
        latent: Length of z.
        conditions: Maps (z, y) to the input of `start` and to the inputs of the norms of each block
            (`nets/conditioning.py`).
        start: Maps to [N, channels of the first block * pixels of the grid].
        grid: (height, width) of the maps that the first block gets.
        blocks: Blocks in order; each is called with its input and the input of its norms.
        widths: Channels after the last block, and of the image.
        layers: Makes the last convolution.
        checkpointing: Recompute the activations inside blocks in backward instead of storing them.
    """

    def __init__(
        self,
        latent: int,
        conditions: nn.Module,
        start: nn.Module,
        grid: tuple[int, int],
        blocks: Iterable[nn.Module],
        widths: tuple[int, int],
        layers: LayerFactory,
        checkpointing: bool,
    ):
        super().__init__()
        self.latent = latent
        self.checkpointing = checkpointing
        self.conditions = conditions
        self.start = start
        self.unflatten = UnflattenGrid(grid)
        self.blocks = nn.ModuleList(blocks)
        self.norm = LaneBatchNorm2d(widths[0])  # unconditional, as in the authors' code of all families
        self.image = layers.conv(*widths, 3)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        first, block_conditions = self.conditions(z, y)
        h = self.unflatten(self.start(first))
        for block, condition in zip(self.blocks, block_conditions):
            h = maybe_checkpoint(block, self.checkpointing, h, condition)
        return maybe_checkpoint(self._to_image, self.checkpointing, h).to(z.dtype)

    def _to_image(self, h: Tensor) -> Tensor:
        return torch.tanh(self.image(F.relu(self.norm(h), inplace=True)))


class ResidualDiscriminator(nn.Module):
    """Images [N, C, H, W], y int64 [N] -> output of the head: logits [N] or more. Without classes y is ignored.

    Args:
        label_map: Maps (images, y) to the input of the first block.
        blocks: Blocks in order.
        head: Maps (features [N, F], y) to the output; features are sums over pixels.
        checkpointing: Recompute the activations inside blocks in backward instead of storing them.
    """

    def __init__(self, label_map: nn.Module, blocks: Iterable[nn.Module], head: nn.Module, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        self.label_map = label_map
        self.input_format = MemoryFormat()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = self.input_format(self.label_map(x, y))
        for block in self.blocks:
            h = maybe_checkpoint(block, self.checkpointing, h)
        return self.head(F.relu(h, inplace=True).sum((2, 3)), y)


class UpBlock(nn.Module):
    """[N, a, H, W] -> [N, b, 2 H, 2 W]: norm, ReLU, up, conv, norm, ReLU, conv, plus a 1x1 shortcut.

    `norm(channels)` makes a batch norm, which is called with (maps, condition of this block).
    """

    def __init__(self, a: int, b: int, norm: Callable[[int], nn.Module], layers: LayerFactory):
        super().__init__()
        self.norm1 = norm(a)
        self.norm2 = norm(b)
        self.conv1 = layers.up(a, b, 3, layers.residual_gain)
        self.conv2 = layers.conv(b, b, 3, layers.residual_gain)
        self.shortcut = layers.up(a, b, 1)

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x, condition), inplace=True))
        h = self.conv2(F.relu(self.norm2(h, condition), inplace=True))
        return h + self.shortcut(x)


class DownBlock(nn.Module):
    """[N, a, H, W] -> [N, b, H / 2, W / 2], or H, W without `down`: ReLU, conv, ReLU, conv, pool, plus a shortcut.

    Args:
        first_activation: The first ReLU; the identity if the input is an image (the authors' "optimized block").
        a: Channels of the input.
        hidden: Channels between the two convolutions.
        b: Channels of the output.
        down: Whether the block halves the resolution.
        layers: Makes the convolutions.
        relu_shortcut: Whether the shortcut starts from the activated input.
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
        self.first_activation = first_activation
        self.relu_shortcut = relu_shortcut
        make_conv = layers.down if down else layers.conv
        self.conv1 = layers.conv(a, hidden, 3, layers.residual_gain)
        self.conv2 = make_conv(hidden, b, 3, layers.residual_gain)
        self.shortcut = make_conv(a, b, 1) if down or a != b else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        activated = self.first_activation(x)
        h = self.conv2(F.relu(self.conv1(activated), inplace=True))
        return h + self.shortcut(activated if self.relu_shortcut else x)


def g_blocks(
    spec: Spec, widths: Sequence[int], norm: Callable[[int], nn.Module], attention: int, layers: LayerFactory
) -> Iterable[nn.Module]:
    """Return a generator's blocks from the start grid up.

    Args:
        spec: The images.
        widths: Channels at the start grid, twice that, ..., the image.
        norm: Makes a batch norm of so many channels.
        attention: Short side of the maps with self-attention in pixels; 0 for none.
        layers: Makes the layers.
    """
    short_side = min(start_grid(spec.size))
    pairs = enumerate(itertools.pairwise(widths))
    stages = ((UpBlock(a, b, norm, layers), short_side << i + 1, b) for i, (a, b) in pairs)
    return insert_attention(stages, attention, layers)


def build_generator(
    spec: Spec,
    widths: Sequence[int],
    latent: int,
    kind: GConditioningKind,
    attention: int,
    layers: LayerFactory,
    checkpointing: bool,
) -> ResidualGenerator:
    """Build the generator of SNGAN or SAGAN: every norm has its own gain and bias per class.

    Args:
        spec: The images.
        widths: Channels at the start grid, twice that, ..., the image.
        latent: Length of z.
        kind: How the generator is conditioned on the class.
        attention: Short side of the maps with self-attention in pixels; 0 for none.
        layers: Makes the layers.
        checkpointing: Recompute activations in backward.
    """
    conditions = g_input(kind, latent, spec.classes)
    grid = start_grid(spec.size)
    start = layers(nn.Linear(conditions.out_features, widths[0] * math.prod(grid)))
    norm = partial(batch_norm, classes=spec.classes if kind == "batch_norm" else 0)
    blocks = g_blocks(spec, widths, norm, attention, layers)
    image_widths = (widths[-1], spec.channels)
    return ResidualGenerator(latent, conditions, start, grid, blocks, image_widths, layers, checkpointing)


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
    """Build the discriminator of any of the four families.

    Args:
        spec: The images.
        stages: (channels of the output, whether it halves the resolution) of each block.
        block_width: Channels inside a block: those of its input or of its output.
        kind: How the discriminator is conditioned on the class.
        attention: Short side of the maps with self-attention in pixels; 0 for none.
        layers: Makes the layers.
        checkpointing: Recompute activations in backward.
        shortcut: Input of the shortcuts: the block's input, or its ReLU.
        embedding_length: Length of a contrastive embedding.
    """
    label_map = d_input(kind, spec.classes)
    channels = spec.channels + label_map.extra_channels
    block_stages = _d_blocks(spec.size.short_side, channels, stages, block_width, layers, shortcut == "activated")
    blocks = list(insert_attention(block_stages, attention, layers))
    head = make_head(kind, stages[-1][0], spec.classes, layers, embedding_length)
    return ResidualDiscriminator(label_map, blocks, head, checkpointing)


def _d_blocks(
    short_side: int,
    in_channels: int,
    stages: Sequence[tuple[int, bool]],
    block_width: Literal["in", "out"],
    layers: LayerFactory,
    relu_shortcut: bool,
) -> Iterable[tuple[nn.Module, int, int]]:
    """Yield (block, short side of its output in pixels, channels of its output)."""
    for i, (out_channels, down) in enumerate(stages):
        short_side = short_side // 2 if down else short_side
        is_first = i == 0
        hidden = in_channels if block_width == "in" and not is_first else out_channels
        first_activation = nn.Identity() if is_first else nn.ReLU()
        yield (
            DownBlock(first_activation, in_channels, hidden, out_channels, down, layers, relu_shortcut),
            short_side,
            out_channels,
        )
        in_channels = out_channels
