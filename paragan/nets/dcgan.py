"""DCGAN for images of any size whose halvings are whole.

Radford, Metz and Chintala, "Unsupervised Representation Learning ...", 2016. Channels double from `width` at image
resolution down to the start grid (4x4), up to 8 `width`: at 64 px these are the paper's networks. Departures: a linear
head on D's last features (the same as the usual 4x4 convolution); by default spectral norm instead of batch norm in D;
with classes, conditional batch norm in G and projection in D. With a single halving (8 px) one stage of stride 2 would
make networks of one layer, so there the convolution at the image is 3x3 with stride 1.
"""

import itertools
import math
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.schema import config_class
from paragan.nets.conditioning import (
    DConditioning,
    DConditioningKind,
    GConditioning,
    GConditioningKind,
    LabelMap,
    NoLabelMap,
    check_conditioning,
    d_input,
    g_input,
    resolve_conditioning,
    resolve_d_conditioning,
)
from paragan.nets.discriminator_heads import make_head
from paragan.nets.lane_batch_norm import LaneBatchNorm2d, batch_norm
from paragan.nets.layers import LayerFactory
from paragan.nets.memory_format import FlattenCL, MemoryFormat, UnflattenGrid
from paragan.nets.spec import Spec, check_size, num_halvings, start_grid
from paragan.nets.spectral_norm import add_spectral_norm


@config_class
class DCGAN:
    """Plain convolutional generator and discriminator, for sizes of at least one halving (from 8 px)."""

    name: Literal["dcgan"] = "dcgan"
    """Name of the family of networks."""
    width: Annotated[int, Field(ge=1)] = 64
    """Channels of both networks at image resolution; they double with each halving of it, up to 8 times as many."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""
    spectral: bool = True
    """Spectral norm in the discriminator: trains stably on small data."""
    batch_norm: bool = False
    """Batch norm in the discriminator after all convolutions but the first, as in the paper."""
    g_conditioning: GConditioning = "auto"
    """How G is conditioned on the class; auto: a gain and bias per class in every batch norm."""
    d_conditioning: DConditioning = "auto"
    """How D is conditioned on the class; auto: projection."""

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return DCGANGenerator(
            spec, self.width, self.latent, resolve_conditioning(self.g_conditioning, "batch_norm", spec)
        )

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_d_conditioning(self, spec)
        return DCGANDiscriminator(spec, self.width, kind, self.spectral, self.batch_norm)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution or the conditioning does not fit `spec`."""
        check_size(spec)
        check_conditioning(self, spec)


class DCGANGenerator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, H, W] in [-1, 1], dtype of z. Without classes y is ignored."""

    def __init__(self, spec: Spec, width: int, latent: int, kind: GConditioningKind):
        super().__init__()
        self.latent = latent
        self.conditions = g_input(kind, latent, spec.classes)
        classes = spec.classes if kind == "batch_norm" else 0
        grid = start_grid(spec.size)
        widths = _channels(spec, width)
        self.start = nn.Linear(self.conditions.out_features, widths[0] * math.prod(grid), bias=False)
        ups = [_up(a, b, bias=False) for a, b in itertools.pairwise(widths)]
        self.ups = nn.ModuleList([nn.Identity(), *ups])  # to the start grid, twice that, ...
        self.norms = nn.ModuleList([batch_norm(channels, classes) for channels in widths])
        self.image = _up(widths[-1], spec.channels, _image_stride(spec))
        self.unflatten = UnflattenGrid(grid)
        for layer in self.modules():
            _initialise(layer)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        first, _ = self.conditions(z, y)
        h = self.unflatten(self.start(first))
        for up, norm in zip(self.ups, self.norms):
            h = F.relu(norm(up(h), y), inplace=True)
        return torch.tanh(self.image(h)).to(z.dtype)


class DCGANDiscriminator(nn.Module):
    """Images [N, C, H, W], y int64 [N] -> output of the head: logits [N] or more. Without classes y is ignored."""

    def __init__(self, spec: Spec, width: int, kind: DConditioningKind, spectral: bool, batch_norm: bool):
        super().__init__()
        widths = _channels(spec, width)[::-1]
        self.label_map: LabelMap | NoLabelMap = d_input(kind, spec.classes)
        in_channels = spec.channels + self.label_map.extra_channels
        layers = [_down(in_channels, widths[0], spectral, _image_stride(spec)), _leaky_relu()]
        for a, b in itertools.pairwise(widths):
            norm = [_initialise(LaneBatchNorm2d(b))] if batch_norm else []
            layers += [_down(a, b, spectral, bias=not batch_norm), *norm, _leaky_relu()]
        self.body = nn.Sequential(*layers)  # [N, C, H, W] -> [N, widths[-1], *start_grid]
        self.input_format = MemoryFormat()
        self.flatten = FlattenCL()
        self.head = make_head(
            kind, widths[-1] * math.prod(start_grid(spec.size)), spec.classes, LayerFactory(_normal, spectral)
        )

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.head(self.flatten(self.body(self.input_format(self.label_map(x, y)))), y)


def _image_stride(spec: Spec) -> int:
    """Return the stride of the convolution at the image: 2, but 1 with a single halving (8 px)."""
    return 1 if num_halvings(spec.size) == 1 else 2


def _channels(spec: Spec, width: int) -> list[int]:
    """Return the channels at the start grid, twice that, ... up to the last layer before the image."""
    doublings = max(num_halvings(spec.size) - 1, 1)
    return [width * min(1 << doublings - i, 8) for i in range(doublings + 1)]


def _up(a: int, b: int, stride: int = 2, bias: bool = True) -> nn.Module:
    return nn.ConvTranspose2d(a, b, 2 + stride, stride, padding=1, bias=bias)


def _down(a: int, b: int, spectral: bool, stride: int = 2, bias: bool = True) -> nn.Module:
    layer = _initialise(nn.Conv2d(a, b, 2 + stride, stride, padding=1, bias=bias))
    return add_spectral_norm(layer) if spectral else layer


def _leaky_relu() -> nn.Module:
    return nn.LeakyReLU(0.2, inplace=True)


def _normal(weight: Tensor, gain: float = 1.0) -> Tensor:
    return nn.init.normal_(weight, 0, 0.02)


def _initialise(layer: nn.Module) -> nn.Module:
    """Initialise a layer: weights N(0, 0.02), gains of batch norm N(1, 0.02), biases 0, as in the paper."""
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        _normal(layer.weight)
    elif isinstance(layer, LaneBatchNorm2d) and layer.affine:
        nn.init.normal_(layer.weight, 1, 0.02)
    else:
        return layer
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
