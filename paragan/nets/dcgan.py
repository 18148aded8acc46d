"""DCGAN at any resolution: Radford, Metz and Chintala, "Unsupervised Representation Learning ...", 2016.

Channels double from `width` beside the image down to 4x4, and stop at 8 `width`: at 64 px these are the
paper's nets. Departures: a linear discriminator head over the 4x4 features (the same as the usual 4x4
convolution), spectral norm in place of the discriminator's batch norm unless asked, class-conditional batch
norm and projection with classes. At 8 px a single stride-2 stage would make one-layer nets, so there the
image ends meet a 3x3 convolution at full size.
"""

import itertools
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
from paragan.nets.memory_format import FlattenCL, MemoryFormat, Unflatten4x4
from paragan.nets.spec import Spec, check_power_of_two
from paragan.nets.spectral_norm import add_spectral_norm as spectrally


@config_class
class DCGAN:
    """Plain convolutional generator and discriminator, for any power of two from 8 px."""

    name: Literal["dcgan"] = "dcgan"
    """Which networks these are."""
    width: Annotated[int, Field(ge=1)] = 64
    """Channels of both networks beside the image; they double downward, to at most 8 times as many."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""
    spectral: bool = True
    """Spectral norm in the discriminator: trains stably on small data."""
    batch_norm: bool = False
    """Batch norm in the discriminator after all convolutions but the first, as in the paper."""
    g_conditioning: GConditioning = "auto"
    """How G is told the class; auto: a gain and bias per class in every batch norm."""
    d_conditioning: DConditioning = "auto"
    """How D is told the class; auto: projection."""

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        return DCGANGenerator(
            spec, self.width, self.latent, resolve_conditioning(self.g_conditioning, "batch_norm", spec)
        )

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind = resolve_d_conditioning(self, spec)
        return DCGANDiscriminator(spec, self.width, kind, self.spectral, self.batch_norm)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution or a conditioning that does not fit, naming what would work."""
        check_power_of_two(spec, minimum=8)
        check_conditioning(self, spec)


class DCGANGenerator(nn.Module):
    """z [N, latent], y int64 [N] -> images [N, C, R, R] in [-1, 1], dtype of z. No classes: y unused."""

    def __init__(self, spec: Spec, width: int, latent: int, kind: GConditioningKind):
        super().__init__()
        self.latent = latent
        self.conditions = g_input(kind, latent, spec.classes)
        classes = spec.classes if kind == "batch_norm" else 0
        widths, stride = _channels(spec.resolution, width), _image_stride(spec.resolution)
        self.start = nn.Linear(self.conditions.out_features, widths[0] * 4 * 4, bias=False)
        ups = [_up(a, b, bias=False) for a, b in itertools.pairwise(widths)]
        self.ups = nn.ModuleList([nn.Identity(), *ups])  # to 4x4, 8x8, ...
        self.norms = nn.ModuleList([batch_norm(channels, classes) for channels in widths])
        self.image = _up(widths[-1], spec.channels, stride)
        self.unflatten = Unflatten4x4()
        for layer in self.modules():
            _initialise(layer)

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        first, _ = self.conditions(z, y)
        h = self.unflatten(self.start(first))
        for up, norm in zip(self.ups, self.norms):
            h = F.relu(norm(up(h), y), inplace=True)
        return torch.tanh(self.image(h)).to(z.dtype)


class DCGANDiscriminator(nn.Module):
    """Images [N, C, R, R], y int64 [N] -> logits [N], float32 or wider, or what the head says. No classes: y unused."""

    def __init__(self, spec: Spec, width: int, kind: DConditioningKind, spectral: bool, batch_norm: bool):
        super().__init__()
        widths, stride = _channels(spec.resolution, width)[::-1], _image_stride(spec.resolution)
        self.label_map: LabelMap | NoLabelMap = d_input(kind, spec.classes)
        layers = [_down(spec.channels + self.label_map.extra_channels, widths[0], spectral, stride), _leaky()]
        for a, b in itertools.pairwise(widths):
            norm = [_initialise(LaneBatchNorm2d(b))] if batch_norm else []
            layers += [_down(a, b, spectral, bias=not batch_norm), *norm, _leaky()]
        self.body = nn.Sequential(*layers)  # [N, C, R, R] -> [N, widths[-1], 4, 4]
        self.input_format, self.flatten = MemoryFormat(), FlattenCL()
        self.head = make_head(kind, widths[-1] * 4 * 4, spec.classes, LayerFactory(_normal, spectral))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.head(self.flatten(self.body(self.input_format(self.label_map(x, y)))), y)


def _image_stride(resolution: int) -> int:
    """Of the convolution at the image: 2, but 1 at 8 px."""
    return 1 if resolution == 8 else 2


def _channels(resolution: int, width: int) -> list[int]:
    """Channels at 4x4, 8x8, ... up to the last layer before the image."""
    top = resolution // _image_stride(resolution)
    sizes = [4 << i for i in range((top // 4).bit_length())]
    return [width * min(top // size, 8) for size in sizes]


def _up(a: int, b: int, stride: int = 2, bias: bool = True) -> nn.Module:
    return nn.ConvTranspose2d(a, b, 2 + stride, stride, padding=1, bias=bias)


def _down(a: int, b: int, spectral: bool, stride: int = 2, bias: bool = True) -> nn.Module:
    layer = _initialise(nn.Conv2d(a, b, 2 + stride, stride, padding=1, bias=bias))
    return spectrally(layer) if spectral else layer


def _leaky() -> nn.Module:
    return nn.LeakyReLU(0.2, inplace=True)


def _normal(weight: Tensor, gain: float = 1.0) -> Tensor:
    return nn.init.normal_(weight, 0, 0.02)


def _initialise(layer: nn.Module) -> nn.Module:
    """Weights N(0, 0.02), gains of a plain batch norm N(1, 0.02), biases 0, as in the paper and its code."""
    if isinstance(layer, nn.Linear | nn.Conv2d | nn.ConvTranspose2d):
        _normal(layer.weight)
    elif isinstance(layer, LaneBatchNorm2d) and layer.affine:
        nn.init.normal_(layer.weight, 1, 0.02)
    else:
        return layer
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
