"""SNGAN's residual networks for images of any size whose halvings are whole.

Miyato, Kataoka, Koyama and Yoshida, "Spectral Normalization for Generative Adversarial Networks", 2018, and for classes
Miyato and Koyama, "cGANs with Projection Discriminator", 2018. Blocks, widths and initialisation are as in the authors'
code, with the fused convolutions of `nets/resample.py`.
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
from paragan.nets.spec import Spec, check_size, num_halvings

RESIDUAL_GAIN = math.sqrt(2)  # gain of Glorot's initialisation in residual branches; 1 elsewhere


@config_class
class SNGAN(ResidualConfig):
    """Residual generator and spectrally normalised residual discriminator, for sizes of at least one halving (8 px).

    Up to 3 halvings (32 px) all blocks have `width` channels (the paper's CIFAR-10 networks: 256, and 128 in D). From 4
    on (64 px), `width` channels at image resolution, which double with each halving of it, up to 16 times (its ImageNet
    networks: `width=64, d_width=64`).
    """

    name: Literal["sngan"] = "sngan"
    width: Annotated[int, Field(ge=1)] = 256
    """Channels of G: throughout up to 3 halvings, at image resolution with more."""
    d_width: Annotated[int | None, Field(ge=1)] = None
    """Channels of D, likewise; None: half of `width`."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""
    block_width: Literal["in", "out"] = "in"
    """Channels between the convolutions of D's blocks: those of the input (the authors) or the output (StudioGAN)."""

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_conditioning(self.g_conditioning, "batch_norm", spec)
        widths = g_channels(num_halvings(spec.size), self.width)
        layers = self._layer_factory(spectral=False)
        return build_generator(spec, widths, self.latent, kind, 0, layers, self.checkpointing)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_d_conditioning(self, spec)
        stages = d_channels(num_halvings(spec.size), self.d_width or max(1, self.width // 2))
        layers = self._layer_factory(self.spectral)
        return build_discriminator(spec, stages, self.block_width, kind, 0, layers, self.checkpointing, self.shortcut)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution or the conditioning does not fit `spec`."""
        check_size(spec)
        check_conditioning(self, spec)

    def _layer_factory(self, spectral: bool) -> LayerFactory:
        return LayerFactory(nn.init.xavier_uniform_, spectral, RESIDUAL_GAIN, self.fused_resampling)


def g_channels(halvings: int, width: int) -> list[int]:
    """Return the generator's channels at the start grid, twice that, ..., the image: `halvings` + 1 of them."""
    if halvings <= 3:
        return [width] * (halvings + 1)
    return [width * min(1 << halvings - i, 16) for i in range(halvings + 1)]


def d_channels(halvings: int, width: int) -> list[tuple[int, bool]]:
    """Return (channels, whether it halves the resolution) of each of the discriminator's blocks.

    Up to 3 halvings (32 px) blocks halve to twice the start grid, and two more follow. With more they halve to the
    start grid, and one more follows.
    """
    if halvings <= 3:
        return [(width, True)] * max(halvings - 1, 1) + [(width, False)] * 2
    return [(width * min(1 << i, 16), i < halvings) for i in range(halvings + 1)]
