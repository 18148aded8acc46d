"""Config fields that families of residual networks share. A family adds its name and its sizes."""

from typing import Annotated, Literal

from pydantic import Field

from paragan.core.schema import config_class
from paragan.nets.conditioning import DConditioning, GConditioning

MIN_HALVINGS = 3  # of images for families with self-attention: 32 x 32
MAX_HALVINGS = 8  # 1024 x 1024


@config_class
class ResidualConfig:
    """Fields of all residual families."""

    name: str = ""
    """Name of the family of networks."""
    spectral: bool = True
    """Spectral norm: in the discriminator of SNGAN, in both networks of the others, but not in G's embeddings."""
    g_conditioning: GConditioning = "auto"
    """How G is conditioned on the class; auto: by every block's batch norms (BigGAN-deep: by the first layer too)."""
    d_conditioning: DConditioning = "auto"
    """How D is conditioned on the class; auto: projection (ContraGAN: contrastive)."""
    fused_resampling: bool = True
    """Fuse convolutions with the up- or downsampling next to them: exact and cheaper (BigGAN-deep: in G only)."""
    shortcut: Literal["input", "activated"] = "input"
    """Input of D's shortcuts: the block's input (the authors' code) or its ReLU (StudioGAN, where ReLU is in place)."""
    checkpointing: bool = False
    """Activation checkpointing: recompute each block in backward. Less memory, more time."""


@config_class
class AttentionConfig(ResidualConfig):
    """Fields of the families with self-attention."""

    attention: Annotated[int | None, Field(ge=0)] = None
    """Short side of the maps with self-attention, pixels; 0: none. None: half that of the image, at most 64."""


@config_class
class BigGANBaseConfig(AttentionConfig):
    """Fields of BigGAN and of ContraGAN, which is BigGAN with another head."""

    width: Annotated[int, Field(ge=1)] = 96
    """Channels of G at image resolution; up to 16 times as many at lower ones. With 3 halvings: 4 times throughout."""
    d_width: Annotated[int | None, Field(ge=1)] = None
    """Channels of D, likewise, but twice throughout with 3 halvings; None: `width`."""
    latent: Annotated[int, Field(ge=1)] = 120
    """Length of z: a multiple of 4 at 32 px, of 5 at 64, of 6 at 128, ... (halvings + 1); the paper has 20 for each."""
    shared: Annotated[int, Field(ge=1)] = 128
    """Length of the class embedding that all batch norms share."""
