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
from paragan.nets.base_config import MAX_HALVINGS, MIN_HALVINGS, AttentionConfig
from paragan.nets.conditioning import (
    DConditioningKind,
    check_conditioning,
    resolve_conditioning,
    resolve_d_conditioning,
)
from paragan.nets.layers import LayerFactory
from paragan.nets.residual import build_discriminator, build_generator
from paragan.nets.sngan import d_channels, g_channels
from paragan.nets.spec import Spec, check_size, num_halvings


@config_class
class SAGAN(AttentionConfig):
    """Residual networks with self-attention, spectrally normalised, for sizes of 3 to 8 halvings (32 to 1024 px).

    From 4 halvings on (64 px), `width` channels at image resolution, which double with each halving of it, up to 16
    times, as in the paper. With 3 (32 px) four times `width` throughout, and twice `d_width` in D (StudioGAN's CIFAR-10
    networks).
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
        check_size(spec, MIN_HALVINGS, MAX_HALVINGS)
        check_conditioning(self, spec)
        d_widths = [channels for channels, _ in self._d_channels(spec)]
        check_attention(self, spec, self._g_channels(spec), d_widths)

    def _g_channels(self, spec: Spec) -> list[int]:
        halvings = num_halvings(spec.size)
        return g_channels(halvings, self.width * (4 if halvings == MIN_HALVINGS else 1))

    def _d_channels(self, spec: Spec) -> list[tuple[int, bool]]:
        halvings = num_halvings(spec.size)
        return d_channels(halvings, (self.d_width or self.width) * (2 if halvings == MIN_HALVINGS else 1))

    def _layer_factory(self) -> LayerFactory:
        return LayerFactory(nn.init.xavier_uniform_, self.spectral, fused_resampling=self.fused_resampling)
