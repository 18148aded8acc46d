"""BigGAN-deep: Brock, Donahue and Simonyan, 2019, appendix B, figure 16 and tables 7 to 9.

Two bottleneck blocks at each resolution. A shortcut has no weights where it can: the generator drops
channels, the discriminator adds those that are missing by a 1x1 convolution. All of z, beside the class's
embedding, is seen by the first layer and by every batch norm. Channels, initialisation and spectral norm as
in `nets/biggan.py`; at 32 px the discriminator halves down to 4x4, as in StudioGAN.
"""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.schema import record
from paragan.nets.attention import attended, need_attention, where
from paragan.nets.base_config import Attending
from paragan.nets.biggan import FALLING, RISING, embedding
from paragan.nets.conditioning import Judging, Shared, chosen, judging, need_classes, shown
from paragan.nets.discriminator_heads import head
from paragan.nets.lane_batch_norm import VectorBatchNorm2d
from paragan.nets.layers import Layers
from paragan.nets.resample import upsampled
from paragan.nets.residual import Discriminator, Generator
from paragan.nets.spec import Spec, need_power_of_two


@record
class BigGANDeep(Attending):
    """Bottleneck residual networks, twice as many blocks as `BigGAN`, for powers of two from 32 to 1024 px."""

    name: Literal["biggan-deep"] = "biggan-deep"
    width: Annotated[int, Field(ge=4)] = 128
    """Channels of the generator beside the image; up to 16 times as many below, and 4 times throughout at 32 px."""
    d_width: Annotated[int | None, Field(ge=4)] = None
    """Channels of the discriminator, likewise, but twice throughout at 32 px; `width` if not given."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""
    shared: Annotated[int, Field(ge=1)] = 128
    """Length of the class embedding that all batch norms share."""

    own_judging: ClassVar[Judging] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, layers = chosen(self.g_conditioning, "batch_norm", spec), self._layers()
        widths = self._rising(spec)
        conditions = Shared(kind, self.latent, 1, embedding(spec, self.shared))
        start = layers(nn.Linear(conditions.inputs, widths[0] * 4 * 4))
        norm = partial(VectorBatchNorm2d, length=conditions.length, make=layers)
        blocks = attended(_rising(widths, norm, layers), where(self.attention, spec), layers)
        ends = widths[-1], spec.channels
        return Generator(self.latent, conditions, start, blocks, ends, layers, self.checkpointing)

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, layers = judging(self, spec), self._layers()
        widths = self._falling(spec)
        first = shown(kind, spec.classes)
        stages = _falling(spec, spec.channels + first.maps, widths, layers, self.shortcut == "activated")
        blocks = list(attended(stages, where(self.attention, spec), layers))
        return Discriminator(first, blocks, head(kind, widths[-1], spec.classes, layers), self.checkpointing)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution, a conditioning, widths or attention that do not fit."""
        need_power_of_two(spec, least=32, most=1024)
        need_classes(self, spec)
        need_attention(where(self.attention, spec), spec, self._rising(spec), self._falling(spec)[1:])

    def _rising(self, spec: Spec) -> list[int]:
        return [self.width * times for times in RISING[spec.resolution]]

    def _falling(self, spec: Spec) -> list[int]:
        return [(self.d_width or self.width) * times for times in FALLING[spec.resolution]]

    def _layers(self) -> Layers:
        return Layers(nn.init.orthogonal_, self.spectral, rewritten=self.rewritten)


class RisingBottleneck(nn.Module):
    """[N, a, R, R] -> [N, b, R, R], or 2 R with `up`; a quarter of `a` channels inside; b <= a.

    Four times norm, ReLU, conv: 1x1, 3x3 (upsampling before it), 3x3, 1x1. The shortcut is the first b channels.
    """

    def __init__(self, a: int, b: int, up: bool, norm: Callable[[int], nn.Module], layers: Layers):
        super().__init__()
        self.b, self.up = b, up
        inside = a // 4
        self.norms = nn.ModuleList([norm(a), norm(inside), norm(inside), norm(inside)])
        second = layers.up if up else layers.conv
        convs = [layers.conv(a, inside, 1), second(inside, inside, 3)]
        self.convs = nn.ModuleList([*convs, layers.conv(inside, inside, 3), layers.conv(inside, b, 1)])

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        h = x
        for norm, conv in zip(self.norms, self.convs):
            h = conv(F.relu(norm(h, seen), inplace=True))
        x = x[:, : self.b]
        return h + (upsampled(x) if self.up else x)


class FallingBottleneck(nn.Module):
    """[N, a, R, R] -> [N, b, R, R], or R / 2 with `down`; a quarter of `b` channels inside; b >= a.

    Four times ReLU, conv: 1x1, 3x3, 3x3, 1x1 (pooling before it, after its ReLU). The shortcut is the input,
    beside b - a channels of a 1x1 convolution of it; with `activated`, the ReLU of the input.
    """

    def __init__(self, a: int, b: int, down: bool, layers: Layers, activated: bool):
        super().__init__()
        self.activated = activated
        inside = b // 4
        self.pool = nn.AvgPool2d(2) if down else nn.Identity()
        self.convs = nn.ModuleList([layers.conv(a, inside, 1), *(layers.conv(inside, inside, 3) for _ in range(2))])
        self.last = layers.conv(inside, b, 1)
        self.more = layers.conv(a, b - a, 1) if b > a else None

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(x)
        x = self.pool(h if self.activated else x)
        for conv in self.convs:
            h = F.relu(conv(h), inplace=True)
        more = [] if self.more is None else [self.more(x)]
        return self.last(self.pool(h)) + torch.cat([x, *more], 1)


def _rising(
    widths: list[int], norm: Callable[[int], nn.Module], layers: Layers
) -> Iterable[tuple[nn.Module, int, int]]:
    """(block, resolution, channels), two for each octave; the second rises."""
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        yield RisingBottleneck(a, a, False, norm, layers), 0, a  # attention comes after both of a resolution
        yield RisingBottleneck(a, b, True, norm, layers), 8 << i, b


def _falling(
    spec: Spec, channels: int, widths: list[int], layers: Layers, activated: bool
) -> Iterable[tuple[nn.Module, int, int]]:
    """(block, resolution, channels): a convolution, then two for each octave; the first falls."""
    size = spec.resolution
    yield layers.conv(channels, widths[0], 3), size, widths[0]
    for a, b in itertools.pairwise(widths):
        size //= 2
        yield FallingBottleneck(a, b, True, layers, activated), 0, b  # attention comes after both of a resolution
        yield FallingBottleneck(b, b, False, layers, activated), size, b
