"""BigGAN-deep: Brock, Donahue and Simonyan, 2019, appendix B, figure 16 and tables 7 to 9.

Two bottleneck blocks at each resolution. Shortcuts keep the channels that they can: the generator drops the rest, the
discriminator adds the missing ones by a 1x1 convolution. All of z, together with the class embedding, goes into the
first layer and into every batch norm. Channels, initialisation and spectral norm are as in `nets/biggan.py`; at 32 px
the discriminator halves down to the start grid, as in StudioGAN.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.schema import config_class
from paragan.nets.attention import attention_resolution, check_attention, insert_attention
from paragan.nets.base_config import MAX_HALVINGS, MIN_HALVINGS, AttentionConfig
from paragan.nets.biggan import D_WIDTH_MULTIPLIERS, G_WIDTH_MULTIPLIERS, class_embedding
from paragan.nets.conditioning import (
    DConditioningKind,
    SharedEmbedding,
    check_conditioning,
    d_input,
    resolve_conditioning,
    resolve_d_conditioning,
)
from paragan.nets.discriminator_heads import make_head
from paragan.nets.lane_batch_norm import LinearConditionalBatchNorm2d
from paragan.nets.layers import LayerFactory
from paragan.nets.resample import upsample_nearest
from paragan.nets.residual import ResidualDiscriminator, ResidualGenerator
from paragan.nets.spec import Spec, check_size, num_halvings, start_grid


@config_class
class BigGANDeep(AttentionConfig):
    """Bottleneck residual networks, twice as many blocks as `BigGAN`, for sizes of 3 to 8 halvings (32 to 1024 px)."""

    name: Literal["biggan-deep"] = "biggan-deep"
    width: Annotated[int, Field(ge=4)] = 128
    """Channels of G at image resolution; up to 16 times as many at lower ones. With 3 halvings: 4 times throughout."""
    d_width: Annotated[int | None, Field(ge=4)] = None
    """Channels of D, likewise, but twice throughout with 3 halvings; None: `width`."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""
    shared: Annotated[int, Field(ge=1)] = 128
    """Length of the class embedding that all batch norms share."""

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_conditioning(self.g_conditioning, "batch_norm", spec)
        layers = self._layer_factory()
        widths = self._g_channels(spec)
        conditions = SharedEmbedding(kind, self.latent, 1, class_embedding(spec, self.shared))
        grid = start_grid(spec.size)
        start = layers(nn.Linear(conditions.out_features, widths[0] * math.prod(grid)))
        norm = partial(LinearConditionalBatchNorm2d, length=conditions.norm_features, make=layers)
        stages = _g_blocks(min(grid), widths, norm, layers)
        blocks = insert_attention(stages, attention_resolution(self.attention, spec), layers)
        image_widths = (widths[-1], spec.channels)
        return ResidualGenerator(self.latent, conditions, start, grid, blocks, image_widths, layers, self.checkpointing)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_d_conditioning(self, spec)
        layers = self._layer_factory()
        widths = self._d_channels(spec)
        label_map = d_input(kind, spec.classes)
        channels = spec.channels + label_map.extra_channels
        stages = _d_blocks(spec, channels, widths, layers, self.shortcut == "activated")
        blocks = list(insert_attention(stages, attention_resolution(self.attention, spec), layers))
        head = make_head(kind, widths[-1], spec.classes, layers)
        return ResidualDiscriminator(label_map, blocks, head, self.checkpointing)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution, conditioning, widths or attention do not fit `spec`."""
        check_size(spec, MIN_HALVINGS, MAX_HALVINGS)
        check_conditioning(self, spec)
        check_attention(self, spec, self._g_channels(spec), self._d_channels(spec)[1:])

    def _g_channels(self, spec: Spec) -> list[int]:
        return [self.width * multiple for multiple in G_WIDTH_MULTIPLIERS[num_halvings(spec.size)]]

    def _d_channels(self, spec: Spec) -> list[int]:
        return [(self.d_width or self.width) * multiple for multiple in D_WIDTH_MULTIPLIERS[num_halvings(spec.size)]]

    def _layer_factory(self) -> LayerFactory:
        return LayerFactory(nn.init.orthogonal_, self.spectral, fused_resampling=self.fused_resampling)


class UpBottleneck(nn.Module):
    """[N, a, H, W] -> [N, b, H, W], or 2 H, 2 W with `up`, with b <= a and a / 4 channels inside.

    Four times norm, ReLU, conv: 1x1, 3x3 (after upsampling), 3x3, 1x1. The shortcut is the first b channels.
    """

    def __init__(self, a: int, b: int, up: bool, norm: Callable[[int], nn.Module], layers: LayerFactory):
        super().__init__()
        self.out_channels = b
        self.up = up
        inside = a // 4
        self.norms = nn.ModuleList([norm(a), norm(inside), norm(inside), norm(inside)])
        second = layers.up if up else layers.conv
        convs = [layers.conv(a, inside, 1), second(inside, inside, 3)]
        self.convs = nn.ModuleList([*convs, layers.conv(inside, inside, 3), layers.conv(inside, b, 1)])

    def forward(self, x: Tensor, condition: Tensor | None) -> Tensor:
        h = x
        for norm, conv in zip(self.norms, self.convs):
            h = conv(F.relu(norm(h, condition), inplace=True))
        x = x[:, : self.out_channels]
        return h + (upsample_nearest(x) if self.up else x)


class DownBottleneck(nn.Module):
    """[N, a, H, W] -> [N, b, H, W], or H / 2, W / 2 with `down`, with b >= a and b / 4 channels inside.

    Four times ReLU, conv: 1x1, 3x3, 3x3, 1x1; pooling comes between the last ReLU and the last conv. The shortcut is
    the input (with `relu_shortcut`: its ReLU), concatenated with a 1x1 convolution of it to b - a channels.
    """

    def __init__(self, a: int, b: int, down: bool, layers: LayerFactory, relu_shortcut: bool):
        super().__init__()
        self.relu_shortcut = relu_shortcut
        inside = b // 4
        self.pool = nn.AvgPool2d(2) if down else nn.Identity()
        self.convs = nn.ModuleList([layers.conv(a, inside, 1), *(layers.conv(inside, inside, 3) for _ in range(2))])
        self.last = layers.conv(inside, b, 1)
        self.extra_channels = layers.conv(a, b - a, 1) if b > a else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(x)
        x = self.pool(h if self.relu_shortcut else x)
        for conv in self.convs:
            h = F.relu(conv(h), inplace=True)
        extra = [] if self.extra_channels is None else [self.extra_channels(x)]
        return self.last(self.pool(h)) + torch.cat([x, *extra], 1)


def _g_blocks(
    grid_side: int, widths: list[int], norm: Callable[[int], nn.Module], layers: LayerFactory
) -> Iterable[tuple[nn.Module, int, int]]:
    """Yield (block, short side, channels of its output), two for each resolution; the second one upsamples."""
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        yield UpBottleneck(a, a, False, norm, layers), 0, a  # 0: attention goes after the second block
        yield UpBottleneck(a, b, True, norm, layers), grid_side << i + 1, b


def _d_blocks(
    spec: Spec, channels: int, widths: list[int], layers: LayerFactory, relu_shortcut: bool
) -> Iterable[tuple[nn.Module, int, int]]:
    """Yield (block, short side, channels of its output): a convolution, then two blocks for each resolution."""
    short_side = spec.size.short_side
    yield layers.conv(channels, widths[0], 3), short_side, widths[0]
    for a, b in itertools.pairwise(widths):
        short_side //= 2
        yield DownBottleneck(a, b, True, layers, relu_shortcut), 0, b  # 0: attention goes after the second block
        yield DownBottleneck(b, b, False, layers, relu_shortcut), short_side, b
