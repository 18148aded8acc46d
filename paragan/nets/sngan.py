"""SNGAN's residual networks at any resolution.

Miyato, Kataoka, Koyama and Yoshida, "Spectral Normalization for Generative Adversarial Networks", 2018, and
for classes Miyato and Koyama, "cGANs with Projection Discriminator", 2018; blocks, widths and
initialisation as in the authors' code, with the exact rewrites of `nets/resample.py`.
"""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from paragan.core.schema import config_class
from paragan.nets.base_config import ResidualConfig
from paragan.nets.conditioning import (
    DConditioningKind,
    check_conditioning,
    resolve_conditioning,
    resolve_d_conditioning,
)
from paragan.nets.layers import LayerFactory
from paragan.nets.residual import build_discriminator, build_generator
from paragan.nets.spec import Spec, check_power_of_two

RESIDUAL_GAIN = math.sqrt(2)  # gain of Glorot's initialisation in residual branches; 1 elsewhere


@config_class
class SNGAN(ResidualConfig):
    """Residual generator and spectrally normalised residual discriminator, for any power of two from 8 px.

    Up to 32 px all blocks have `width` channels (the paper's CIFAR-10 nets: 256, and 128 in the
    discriminator); from 64 px on, `width` channels beside the image, doubling downward to at most 16 times
    (its ImageNet nets: 64 in both, so `width=64, d_width=64`).
    """

    name: Literal["sngan"] = "sngan"
    width: Annotated[int, Field(ge=1)] = 256
    """Channels of the generator: throughout up to 32 px, beside the image above."""
    d_width: Annotated[int | None, Field(ge=1)] = None
    """Channels of the discriminator, likewise; half of `width` if not given."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""
    block_width: Literal["in", "out"] = "in"
    """Channels between the two convolutions of D's blocks: as many as go in (the authors) or come out (StudioGAN)."""

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, widths = (
            resolve_conditioning(self.g_conditioning, "batch_norm", spec),
            g_channels(spec.resolution, self.width),
        )
        return build_generator(
            spec, widths, self.latent, kind, 0, self._layer_factory(spectral=False), self.checkpointing
        )

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind = resolve_d_conditioning(self, spec)
        stages = d_channels(spec.resolution, self.d_width or max(1, self.width // 2))
        layers = self._layer_factory(self.spectral)
        return build_discriminator(spec, stages, self.block_width, kind, 0, layers, self.checkpointing, self.shortcut)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution or a conditioning that does not fit, naming what would work."""
        check_power_of_two(spec, minimum=8)
        check_conditioning(self, spec)

    def _layer_factory(self, spectral: bool) -> LayerFactory:
        return LayerFactory(nn.init.xavier_uniform_, spectral, RESIDUAL_GAIN, self.fused_resampling)


def g_channels(resolution: int, width: int) -> list[int]:
    """The generator's channels at 4x4, 8x8, ..., `resolution`."""
    sizes = [4 << i for i in range((resolution // 4).bit_length())]
    if resolution <= 32:
        return [width for _ in sizes]
    return [width * min(resolution // size, 16) for size in sizes]


def d_channels(resolution: int, width: int) -> list[tuple[int, bool]]:
    """(channels, halves?) of the discriminator's blocks: to 8x8, two more; from 64 px: to 4x4, one more."""
    octaves = resolution.bit_length() - 1
    if resolution <= 32:
        return [(width, True)] * max(octaves - 3, 1) + [(width, False)] * 2
    return [(width * min(2**i, 16), i < octaves - 2) for i in range(octaves - 1)]
