"""ContraGAN: Kang and Park, "ContraGAN: Contrastive Learning for Conditional Image Generation", 2020.

BigGAN's networks, whose discriminator says where an image lies on a sphere, and where its class does, in
place of the projection. They want an objective that reads both.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from paragan.config import record
from paragan.nets.biggan import BigGAN
from paragan.nets.conditioning import DConditioning, GConditioning, Judging
from paragan.nets.spec import Spec


@record
class ContraGAN:
    """`BigGAN` with a contrastive head, for powers of two from 32 to 1024 px."""

    name: Literal["contragan"] = "contragan"
    """Which networks these are."""
    width: Annotated[int, Field(ge=1)] = 96
    """Channels of the generator beside the image; up to 16 times as many below, and 4 times throughout at 32 px."""
    d_width: Annotated[int | None, Field(ge=1)] = None
    """Channels of the discriminator, likewise, but twice throughout at 32 px; `width` if not given."""
    latent: Annotated[int, Field(ge=1)] = 120
    """Length of the latent vector z: a multiple of 4 at 32 px, of 5 at 64, of 6 at 128, ...; 20 each in the paper."""
    shared: Annotated[int, Field(ge=1)] = 128
    """Length of the class embedding that all batch norms share."""
    embedding: Annotated[int | None, Field(ge=1)] = None
    """Length of the points on the sphere; as many as D's features if not given (1,536 for ImageNet)."""
    spectral: bool = True
    """Spectral norm in both networks; the shared embedding is without."""
    attention: Annotated[int | None, Field(ge=0)] = None
    """Resolution of self-attention, pixels; 0: none. Not given: half the image's, at most 64."""
    g_conditioning: GConditioning = "auto"
    """How G is told the class; auto: the shared embedding, in every block's batch norms."""
    d_conditioning: DConditioning = "auto"
    """How D is told the class; auto: contrastive."""
    rewritten: bool = True
    """Convolutions beside a change of resolution in their exact cheaper form."""
    checkpointing: bool = False
    """Compute blocks again in backward and keep none of their activations: less memory, more time."""

    own_judging: ClassVar[Judging] = "contrastive"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        return self._nets().generator(spec)

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        features = (self.d_width or self.width) * (2 if spec.resolution == 32 else 16)
        return self._nets().discriminator(spec, "contrastive", self.embedding or features)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution, a latent, a conditioning, widths or attention that do not fit."""
        self._nets().check(spec)

    def _nets(self) -> BigGAN:
        fields = (f.name for f in dataclasses.fields(BigGAN) if f.name != "name")
        return BigGAN(**{name: getattr(self, name) for name in fields})
