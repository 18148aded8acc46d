"""The fields that families of residual networks have in common. A family adds its name and its sizes."""

from typing import Annotated, Literal

from pydantic import Field

from paragan.core.schema import config_class
from paragan.nets.conditioning import DConditioning, GConditioning


@config_class
class ResidualConfig:
    """Of all residual families."""

    name: str = ""
    """Which networks these are."""
    spectral: bool = True
    """Spectral norm: in the discriminator of SNGAN, in both networks of the others; embeddings of G are without."""
    g_conditioning: GConditioning = "auto"
    """How G is told the class; auto: in every block's batch norms (BigGAN-deep: in the first layer too)."""
    d_conditioning: DConditioning = "auto"
    """How D is told the class; auto: projection (ContraGAN: contrastive)."""
    fused_resampling: bool = True
    """Convolutions beside a change of resolution in their exact cheaper form (BigGAN-deep: the generator's)."""
    shortcut: Literal["input", "activated"] = "input"
    """What the shortcuts of D see: a block's input (the authors), or its ReLU (StudioGAN, which works in place)."""
    checkpointing: bool = False
    """Compute blocks again in backward and keep none of their activations: less memory, more time."""


@config_class
class AttentionConfig(ResidualConfig):
    """Of those with self-attention."""

    attention: Annotated[int | None, Field(ge=0)] = None
    """Resolution of self-attention, pixels; 0: none. Not given: half the image's, at most 64."""


@config_class
class BigGANBaseConfig(AttentionConfig):
    """Of BigGAN, and of ContraGAN, which is BigGAN but for a head."""

    width: Annotated[int, Field(ge=1)] = 96
    """Channels of the generator beside the image; up to 16 times as many below, and 4 times throughout at 32 px."""
    d_width: Annotated[int | None, Field(ge=1)] = None
    """Channels of the discriminator, likewise, but twice throughout at 32 px; `width` if not given."""
    latent: Annotated[int, Field(ge=1)] = 120
    """Length of the latent vector z: a multiple of 4 at 32 px, of 5 at 64, of 6 at 128, ...; 20 each in the paper."""
    shared: Annotated[int, Field(ge=1)] = 128
    """Length of the class embedding that all batch norms share."""
