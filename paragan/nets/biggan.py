"""BigGAN: Brock, Donahue and Simonyan, "Large Scale GAN Training for High Fidelity Natural Image Synthesis", 2019.

z is cut into equal chunks: one for the first layer, one for each block, whose batch norms see it beside an
embedding of the class that all blocks share. Spectral norm in both networks, orthogonal initial weights,
attention at one resolution. Channels are those of the paper at 128, 256 and 512 px, of StudioGAN at 32 and
64; 1024 px has one more octave of `width` channels beside the image, which is ours. As in the authors'
PyTorch code, and unlike the paper's table, the first layer does not see the class, and biases start from 0.
"""

from functools import partial
from typing import ClassVar, Literal

from torch import nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.nets.attention import attention_resolution, check_attention
from paragan.nets.base_config import BigGANBaseConfig
from paragan.nets.conditioning import DConditioningKind, SharedEmbedding, check_conditioning, resolve_conditioning
from paragan.nets.lane_batch_norm import LinearConditionalBatchNorm2d
from paragan.nets.layers import LayerFactory
from paragan.nets.residual import ResidualGenerator, build_discriminator, g_blocks
from paragan.nets.spec import Spec, check_power_of_two

# Multiples of `width`, by resolution: at 4x4, 8x8, ..., the image.
G_WIDTH_MULTIPLIERS = {
    32: (4, 4, 4, 4),
    64: (16, 8, 4, 2, 1),
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
    512: (16, 16, 8, 8, 4, 2, 1, 1),
    1024: (16, 16, 8, 8, 4, 2, 1, 1, 1),
}
# Multiples of `d_width`, block by block from the image; but for 32 px all blocks halve, except the last.
D_WIDTH_MULTIPLIERS = {
    32: (2, 2, 2, 2),
    64: (1, 2, 4, 8, 16),
    128: (1, 2, 4, 8, 16, 16),
    256: (1, 2, 4, 8, 8, 16, 16),
    512: (1, 1, 2, 4, 8, 8, 16, 16),
    1024: (1, 1, 1, 2, 4, 8, 8, 16, 16),
}


@config_class
class BigGAN(BigGANBaseConfig):
    """Residual networks with a hierarchical latent, for powers of two from 32 to 1024 px."""

    name: Literal["biggan"] = "biggan"

    default_d_conditioning: ClassVar[DConditioningKind] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, layers = resolve_conditioning(self.g_conditioning, "batch_norm", spec), self._layer_factory()
        widths = self._g_channels(spec)
        conditions = SharedEmbedding(kind, self.latent, len(widths), class_embedding(spec, self.shared))
        start = layers(nn.Linear(conditions.out_features, widths[0] * 4 * 4))
        norm = partial(LinearConditionalBatchNorm2d, length=conditions.norm_features, make=layers)
        blocks = g_blocks(widths, norm, attention_resolution(self.attention, spec), layers)
        ends = widths[-1], spec.channels
        return ResidualGenerator(self.latent, conditions, start, blocks, ends, layers, self.checkpointing)

    def discriminator(
        self, spec: Spec, default: DConditioningKind = "projection", embedding_length: int | None = None
    ) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does.

        own: what `auto` is with classes; length: of a contrastive embedding.
        """
        self.check(spec)
        kind, size = (
            resolve_conditioning(self.d_conditioning, default, spec),
            attention_resolution(self.attention, spec),
        )
        widths = self._d_channels(spec)
        halved = 2 if spec.resolution == 32 else len(widths) - 1
        stages = [(width, i < halved) for i, width in enumerate(widths)]
        return build_discriminator(
            spec, stages, "out", kind, size, self._layer_factory(), self.checkpointing, self.shortcut, embedding_length
        )

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution, a latent, a conditioning, widths or attention that do not fit."""
        check_power_of_two(spec, minimum=32, maximum=1024)
        check_conditioning(self, spec)
        check_attention(
            attention_resolution(self.attention, spec), spec, self._g_channels(spec), self._d_channels(spec)
        )
        parts = len(G_WIDTH_MULTIPLIERS[spec.resolution])
        if self.latent % parts:
            below = self.latent // parts * parts
            raise UsageError(
                f"nets.latent={self.latent}: is cut into {parts} equal chunks at {spec.resolution} px; "
                f"{below or parts} would work{f', and {20 * parts} is customary' * (below != 20 * parts)}"
            )

    def _g_channels(self, spec: Spec) -> list[int]:
        return [self.width * times for times in G_WIDTH_MULTIPLIERS[spec.resolution]]

    def _d_channels(self, spec: Spec) -> list[int]:
        return [(self.d_width or self.width) * times for times in D_WIDTH_MULTIPLIERS[spec.resolution]]

    def _layer_factory(self) -> LayerFactory:
        return LayerFactory(nn.init.orthogonal_, self.spectral, fused_resampling=self.fused_resampling)


def class_embedding(spec: Spec, length: int) -> nn.Embedding | None:
    """Of the class, for all norms; orthogonal."""
    if not spec.classes:
        return None
    shared = nn.Embedding(spec.classes, length)
    nn.init.orthogonal_(shared.weight)
    return shared
