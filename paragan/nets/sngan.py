"""SNGAN's residual networks at any resolution.

Miyato, Kataoka, Koyama and Yoshida, "Spectral Normalization for Generative Adversarial Networks", 2018, and
for classes Miyato and Koyama, "cGANs with Projection Discriminator", 2018; blocks, widths and
initialisation as in the authors' code, with the exact rewrites of `nets/resample.py`.
"""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from paragan.core.schema import record
from paragan.nets.base_config import Residual
from paragan.nets.conditioning import Judging, chosen, judging, need_classes
from paragan.nets.layers import Layers
from paragan.nets.residual import discriminator, generator
from paragan.nets.spec import Spec, need_power_of_two

RESIDUAL = math.sqrt(2)  # gain of Glorot's initialisation in residual branches; 1 elsewhere


@record
class SNGAN(Residual):
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
    hidden: Literal["in", "out"] = "in"
    """Channels between the two convolutions of D's blocks: as many as go in (the authors) or come out (StudioGAN)."""

    own_judging: ClassVar[Judging] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, widths = chosen(self.g_conditioning, "batch_norm", spec), rising(spec.resolution, self.width)
        return generator(spec, widths, self.latent, kind, 0, self._layers(spectral=False), self.checkpointing)

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind = judging(self, spec)
        stages = falling(spec.resolution, self.d_width or max(1, self.width // 2))
        layers = self._layers(self.spectral)
        return discriminator(spec, stages, self.hidden, kind, 0, layers, self.checkpointing, self.shortcut)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution or a conditioning that does not fit, naming what would work."""
        need_power_of_two(spec, least=8)
        need_classes(self, spec)

    def _layers(self, spectral: bool) -> Layers:
        return Layers(nn.init.xavier_uniform_, spectral, RESIDUAL, self.rewritten)


def rising(resolution: int, width: int) -> list[int]:
    """The generator's channels at 4x4, 8x8, ..., `resolution`."""
    sizes = [4 << i for i in range((resolution // 4).bit_length())]
    if resolution <= 32:
        return [width for _ in sizes]
    return [width * min(resolution // size, 16) for size in sizes]


def falling(resolution: int, width: int) -> list[tuple[int, bool]]:
    """(channels, halves?) of the discriminator's blocks: to 8x8, two more; from 64 px: to 4x4, one more."""
    octaves = resolution.bit_length() - 1
    if resolution <= 32:
        return [(width, True)] * max(octaves - 3, 1) + [(width, False)] * 2
    return [(width * min(2**i, 16), i < octaves - 2) for i in range(octaves - 1)]
