"""SAGAN: Zhang, Goodfellow, Metaxas and Odena, "Self-Attention Generative Adversarial Networks", 2019.

SNGAN's residual networks, with attention at one resolution and spectral norm in both. Weights by Glorot's
uniform initialisation as in the authors' code. Departures: attention at half the image's resolution, at most
64 px, which is StudioGAN's place (the paper's best at 128 px is 32); the exact rewrites of `nets/resample.py`.
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from paragan.core.schema import record
from paragan.nets.attention import need_attention, where
from paragan.nets.base_config import Attending
from paragan.nets.conditioning import Judging, chosen, judging, need_classes
from paragan.nets.layers import Layers
from paragan.nets.residual import discriminator, generator
from paragan.nets.sngan import falling, rising
from paragan.nets.spec import Spec, need_power_of_two


@record
class SAGAN(Attending):
    """Residual networks with self-attention, spectrally normalised, for powers of two from 32 to 1024 px.

    From 64 px on, `width` channels beside the image, doubling downward to at most 16 times, as in the paper; at
    32 px four times `width` throughout, and twice `d_width` in the discriminator (StudioGAN's CIFAR-10 nets).
    """

    name: Literal["sagan"] = "sagan"
    width: Annotated[int, Field(ge=1)] = 64
    """Channels of the generator beside the image; a quarter of its channels at 32 px."""
    d_width: Annotated[int | None, Field(ge=1)] = None
    """Channels of the discriminator beside the image, half of its channels at 32 px; `width` if not given."""
    latent: Annotated[int, Field(ge=1)] = 128
    """Length of the latent vector z."""

    own_judging: ClassVar[Judging] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, size = chosen(self.g_conditioning, "batch_norm", spec), where(self.attention, spec)
        return generator(spec, self._rising(spec), self.latent, kind, size, self._layers(), self.checkpointing)

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, size = judging(self, spec), where(self.attention, spec)
        return discriminator(
            spec, self._falling(spec), "out", kind, size, self._layers(), self.checkpointing, self.shortcut
        )

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution, a conditioning, widths or attention that do not fit."""
        need_power_of_two(spec, least=32, most=1024)
        need_classes(self, spec)
        need_attention(where(self.attention, spec), spec, self._rising(spec), [b for b, _ in self._falling(spec)])

    def _rising(self, spec: Spec) -> list[int]:
        return rising(spec.resolution, self.width * (4 if spec.resolution == 32 else 1))

    def _falling(self, spec: Spec) -> list[tuple[int, bool]]:
        return falling(spec.resolution, (self.d_width or self.width) * (2 if spec.resolution == 32 else 1))

    def _layers(self) -> Layers:
        return Layers(nn.init.xavier_uniform_, self.spectral, rewritten=self.rewritten)
