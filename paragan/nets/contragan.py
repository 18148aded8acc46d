"""ContraGAN: Kang and Park, "ContraGAN: Contrastive Learning for Conditional Image Generation", 2020.

BigGAN's networks with a contrastive head: the discriminator maps each image and its class to points on the unit sphere,
instead of a projection. The objective must use both points (`objective.contrastive`).
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from paragan.core.schema import config_class
from paragan.nets.base_config import MIN_HALVINGS, BigGANBaseConfig
from paragan.nets.biggan import BigGAN
from paragan.nets.conditioning import DConditioningKind
from paragan.nets.spec import Spec, num_halvings


@config_class
class ContraGAN(BigGANBaseConfig):
    """`BigGAN` with a contrastive head, for sizes of 3 to 8 halvings (32 to 1024 px)."""

    name: Literal["contragan"] = "contragan"
    embedding: Annotated[int | None, Field(ge=1)] = None
    """Length of the embeddings on the sphere; None: the number of D's features (1,536 for ImageNet)."""

    default_d_conditioning: ClassVar[DConditioningKind] = "contrastive"

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        return self._as_biggan().generator(spec)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        features = (self.d_width or self.width) * (2 if num_halvings(spec.size) == MIN_HALVINGS else 16)
        return self._as_biggan().discriminator(spec, "contrastive", self.embedding or features)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution, latent, conditioning, widths or attention do not fit `spec`."""
        self._as_biggan().check(spec)

    def _as_biggan(self) -> BigGAN:
        fields = (f.name for f in dataclasses.fields(BigGAN) if f.name != "name")
        return BigGAN(**{name: getattr(self, name) for name in fields})
