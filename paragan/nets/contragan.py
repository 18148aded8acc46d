"""ContraGAN: Kang and Park, "ContraGAN: Contrastive Learning for Conditional Image Generation", 2020.

BigGAN's networks, whose discriminator says where an image lies on a sphere, and where its class does, in
place of the projection. They want an objective that reads both.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from paragan.core.schema import config_class
from paragan.nets.base_config import BigGANBaseConfig
from paragan.nets.biggan import BigGAN
from paragan.nets.conditioning import DConditioningKind
from paragan.nets.spec import Spec


@config_class
class ContraGAN(BigGANBaseConfig):
    """`BigGAN` with a contrastive head, for powers of two from 32 to 1024 px."""

    name: Literal["contragan"] = "contragan"
    embedding: Annotated[int | None, Field(ge=1)] = None
    """Length of the points on the sphere; as many as D's features if not given (1,536 for ImageNet)."""

    default_d_conditioning: ClassVar[DConditioningKind] = "contrastive"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        return self._as_biggan().generator(spec)

    def discriminator(self, spec: Spec) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does."""
        features = (self.d_width or self.width) * (2 if spec.resolution == 32 else 16)
        return self._as_biggan().discriminator(spec, "contrastive", self.embedding or features)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution, a latent, a conditioning, widths or attention that do not fit."""
        self._as_biggan().check(spec)

    def _as_biggan(self) -> BigGAN:
        fields = (f.name for f in dataclasses.fields(BigGAN) if f.name != "name")
        return BigGAN(**{name: getattr(self, name) for name in fields})
