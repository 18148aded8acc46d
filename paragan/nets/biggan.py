"""BigGAN: Brock, Donahue and Simonyan, "Large Scale GAN Training for High Fidelity Natural Image Synthesis", 2019.

z is split into equal chunks: one for the first layer, and one for each block, whose batch norms take it together with
a class embedding that all blocks share. Both networks have spectral norm, orthogonal initial weights, and attention at
one resolution. Channels are those of the paper at 128, 256 and 512 px, and of StudioGAN at 32 and 64 px. 1024 px is
our extension: one more stage of `width` channels at image resolution. Other sizes have the channels of the power of two
with as many halvings: 96 px those of 64, 256 x 128 those of 128. As in the authors' PyTorch code, and unlike the
paper's table, the first layer is not conditioned on the class, and biases start at 0.
"""

import math
from functools import partial
from typing import ClassVar, Literal

from torch import nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.nets.attention import attention_resolution, check_attention
from paragan.nets.base_config import MAX_HALVINGS, MIN_HALVINGS, BigGANBaseConfig
from paragan.nets.conditioning import DConditioningKind, SharedEmbedding, check_conditioning, resolve_conditioning
from paragan.nets.lane_batch_norm import LinearConditionalBatchNorm2d
from paragan.nets.layers import LayerFactory
from paragan.nets.residual import ResidualGenerator, build_discriminator, g_blocks
from paragan.nets.spec import Spec, check_size, num_halvings, start_grid

# number of halvings -> channels of G as multiples of `width`, at the start grid, twice that, ..., image resolution.
G_WIDTH_MULTIPLIERS = {
    3: (4, 4, 4, 4),  # 32 px
    4: (16, 8, 4, 2, 1),  # 64 px
    5: (16, 16, 8, 4, 2, 1),
    6: (16, 16, 8, 8, 4, 2, 1),
    7: (16, 16, 8, 8, 4, 2, 1, 1),
    8: (16, 16, 8, 8, 4, 2, 1, 1, 1),  # 1024 px
}
# number of halvings -> channels of D as multiples of `d_width`, block by block from the image. All blocks but the last
# halve the resolution; with 3 halvings only the first two do.
D_WIDTH_MULTIPLIERS = {
    3: (2, 2, 2, 2),
    4: (1, 2, 4, 8, 16),
    5: (1, 2, 4, 8, 16, 16),
    6: (1, 2, 4, 8, 8, 16, 16),
    7: (1, 1, 2, 4, 8, 8, 16, 16),
    8: (1, 1, 1, 2, 4, 8, 8, 16, 16),
}


@config_class
class BigGAN(BigGANBaseConfig):
    """Residual networks with a hierarchical latent, for sizes of 3 to 8 halvings (32 to 1024 px)."""

    name: Literal["biggan"] = "biggan"

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        kind = resolve_conditioning(self.g_conditioning, "batch_norm", spec)
        layers = self._layer_factory()
        widths = self._g_channels(spec)
        conditions = SharedEmbedding(kind, self.latent, len(widths), class_embedding(spec, self.shared))
        grid = start_grid(spec.size)
        start = layers(nn.Linear(conditions.out_features, widths[0] * math.prod(grid)))
        norm = partial(LinearConditionalBatchNorm2d, length=conditions.norm_features, make=layers)
        blocks = g_blocks(spec, widths, norm, attention_resolution(self.attention, spec), layers)
        image_widths = (widths[-1], spec.channels)
        return ResidualGenerator(self.latent, conditions, start, grid, blocks, image_widths, layers, self.checkpointing)

    def discriminator(
        self, spec: Spec, default: DConditioningKind = "projection", embedding_length: int | None = None
    ) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG.

        Args:
            spec: The images.
            default: The conditioning that `d_conditioning=auto` stands for if there are classes.
            embedding_length: Length of the embedding of a contrastive head.

        Raises:
            UsageError: As `check`.
        """
        self.check(spec)
        kind = resolve_conditioning(self.d_conditioning, default, spec)
        size = attention_resolution(self.attention, spec)
        widths = self._d_channels(spec)
        num_halving = 2 if num_halvings(spec.size) == MIN_HALVINGS else len(widths) - 1
        stages = [(width, i < num_halving) for i, width in enumerate(widths)]
        return build_discriminator(
            spec, stages, "out", kind, size, self._layer_factory(), self.checkpointing, self.shortcut, embedding_length
        )

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution, latent, conditioning, widths or attention do not fit `spec`."""
        check_size(spec, MIN_HALVINGS, MAX_HALVINGS)
        check_conditioning(self, spec)
        check_attention(self, spec, self._g_channels(spec), self._d_channels(spec))
        chunks = num_halvings(spec.size) + 1
        if self.latent % chunks:
            multiple = self.latent // chunks * chunks or chunks
            usual = 20 * chunks
            values = f"{multiple}" if multiple == usual else f"{multiple} or {usual}"
            raise UsageError(
                f"nets.latent={self.latent}: must be a multiple of {chunks} at {spec.size.resolution} px, "
                f"one chunk for each layer. Use {values}"
            )

    def _g_channels(self, spec: Spec) -> list[int]:
        return [self.width * multiple for multiple in G_WIDTH_MULTIPLIERS[num_halvings(spec.size)]]

    def _d_channels(self, spec: Spec) -> list[int]:
        return [(self.d_width or self.width) * multiple for multiple in D_WIDTH_MULTIPLIERS[num_halvings(spec.size)]]

    def _layer_factory(self) -> LayerFactory:
        return LayerFactory(nn.init.orthogonal_, self.spectral, fused_resampling=self.fused_resampling)


def class_embedding(spec: Spec, length: int) -> nn.Embedding | None:
    """Return the class embedding [classes, length] that all norms share, orthogonal; None without classes."""
    if not spec.classes:
        return None
    shared = nn.Embedding(spec.classes, length)
    nn.init.orthogonal_(shared.weight)
    return shared
