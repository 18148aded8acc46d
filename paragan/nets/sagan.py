"""SAGAN: Zhang, Goodfellow, Metaxas and Odena, "Self-Attention Generative Adversarial Networks", 2019.

SNGAN's residual networks with attention at one resolution, and with spectral norm in both networks. Weights by Glorot's
uniform initialisation as in the authors' code. Departures: attention at half the image's resolution, at most 64 px, as
in StudioGAN (the paper's best at 128 px is 32); the fused convolutions of `nets/resample.py`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from paragan.core.schema import config_class
from paragan.nets.attention import attention_resolution, check_attention
from paragan.nets.base_config import AttentionConfig
from paragan.nets.conditioning import (
    DConditioningKind,
    check_conditioning,
    resolve_conditioning,
    resolve_d_conditioning,
)
from paragan.nets.layers import LayerFactory
from paragan.nets.residual import build_discriminator, build_generator
from paragan.nets.sngan import d_channels, g_channels
from paragan.nets.spec import Spec, check_power_of_two


@config_class
class SAGAN(AttentionConfig):
    """Residual networks with self-attention, spectrally normalised, for powers of two from 32 to 1024 px.

    From 64 px on, `width` channels at image resolution, which double with each halving of it, up to 16 times, as in the
    paper. At 32 px four times `width` throughout, and twice `d_width` in D (StudioGAN's CIFAR-10 networks).
    """

    name: Literal["sagan"] = "sagan"
    width: Annotated[int, Field(ge=1)] = 64
    """Channels of G at image resolution; a quarter of its channels at 32 px."""
    d_width: Annotated[int | None, Field(ge=1)] = None
    """Channels of D at image resolution, half of its channels at 32 px; None: `width`."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_conditioning(self.g_conditioning, "batch_norm", spec)
        size = attention_resolution(self.attention, spec)
        layers = self._layer_factory()
        return build_generator(spec, self._g_channels(spec), self.latent, kind, size, layers, self.checkpointing)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_d_conditioning(self, spec)
        size = attention_resolution(self.attention, spec)
        stages = self._d_channels(spec)
        layers = self._layer_factory()
        return build_discriminator(spec, stages, "out", kind, size, layers, self.checkpointing, self.shortcut)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution, conditioning, widths or attention do not fit `spec`."""
        check_power_of_two(spec, minimum=32, maximum=1024)
        check_conditioning(self, spec)
        d_widths = [channels for channels, _ in self._d_channels(spec)]
        check_attention(attention_resolution(self.attention, spec), spec, self._g_channels(spec), d_widths)

    def _g_channels(self, spec: Spec) -> list[int]:
        return g_channels(spec.resolution, self.width * (4 if spec.resolution == 32 else 1))

    def _d_channels(self, spec: Spec) -> list[tuple[int, bool]]:
        return d_channels(spec.resolution, (self.d_width or self.width) * (2 if spec.resolution == 32 else 1))

    def _layer_factory(self) -> LayerFactory:
        return LayerFactory(nn.init.xavier_uniform_, self.spectral, fused_resampling=self.fused_resampling)
