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

from paragan.core.errors import Unusable
from paragan.core.schema import record
from paragan.nets.attention import need_attention, where
from paragan.nets.base_config import Hierarchical
from paragan.nets.conditioning import Judging, Shared, chosen, need_classes
from paragan.nets.lane_batch_norm import VectorBatchNorm2d
from paragan.nets.layers import Layers
from paragan.nets.residual import Generator, discriminator, rising_blocks
from paragan.nets.spec import Spec, need_power_of_two

# Multiples of `width`, by resolution: at 4x4, 8x8, ..., the image.
RISING = {
    32: (4, 4, 4, 4),
    64: (16, 8, 4, 2, 1),
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
    512: (16, 16, 8, 8, 4, 2, 1, 1),
    1024: (16, 16, 8, 8, 4, 2, 1, 1, 1),
}
# Multiples of `d_width`, block by block from the image; but for 32 px all blocks halve, except the last.
FALLING = {
    32: (2, 2, 2, 2),
    64: (1, 2, 4, 8, 16),
    128: (1, 2, 4, 8, 16, 16),
    256: (1, 2, 4, 8, 8, 16, 16),
    512: (1, 1, 2, 4, 8, 8, 16, 16),
    1024: (1, 1, 1, 2, 4, 8, 8, 16, 16),
}


@record
class BigGAN(Hierarchical):
    """Residual networks with a hierarchical latent, for powers of two from 32 to 1024 px."""

    name: Literal["biggan"] = "biggan"

    own_judging: ClassVar[Judging] = "projection"

    def generator(self, spec: Spec) -> nn.Module:
        """A fresh `Generator` for `spec`, from torch's global generator. Raises as `check` does."""
        self.check(spec)
        kind, layers = chosen(self.g_conditioning, "batch_norm", spec), self._layers()
        widths = self._rising(spec)
        conditions = Shared(kind, self.latent, len(widths), embedding(spec, self.shared))
        start = layers(nn.Linear(conditions.inputs, widths[0] * 4 * 4))
        norm = partial(VectorBatchNorm2d, length=conditions.length, make=layers)
        blocks = rising_blocks(widths, norm, where(self.attention, spec), layers)
        ends = widths[-1], spec.channels
        return Generator(self.latent, conditions, start, blocks, ends, layers, self.checkpointing)

    def discriminator(self, spec: Spec, own: Judging = "projection", length: int | None = None) -> nn.Module:
        """A fresh `Discriminator` for `spec`, from torch's global generator. Raises as `check` does.

        own: what `auto` is with classes; length: of a contrastive embedding.
        """
        self.check(spec)
        kind, size = chosen(self.d_conditioning, own, spec), where(self.attention, spec)
        widths = self._falling(spec)
        halved = 2 if spec.resolution == 32 else len(widths) - 1
        stages = [(width, i < halved) for i, width in enumerate(widths)]
        return discriminator(spec, stages, "out", kind, size, self._layers(), self.checkpointing, self.shortcut, length)

    def check(self, spec: Spec) -> None:
        """Raise `Unusable` for a resolution, a latent, a conditioning, widths or attention that do not fit."""
        need_power_of_two(spec, least=32, most=1024)
        need_classes(self, spec)
        need_attention(where(self.attention, spec), spec, self._rising(spec), self._falling(spec))
        parts = len(RISING[spec.resolution])
        if self.latent % parts:
            below = self.latent // parts * parts
            raise Unusable(
                f"nets.latent={self.latent}: is cut into {parts} equal chunks at {spec.resolution} px; "
                f"{below or parts} would work{f', and {20 * parts} is customary' * (below != 20 * parts)}"
            )

    def _rising(self, spec: Spec) -> list[int]:
        return [self.width * times for times in RISING[spec.resolution]]

    def _falling(self, spec: Spec) -> list[int]:
        return [(self.d_width or self.width) * times for times in FALLING[spec.resolution]]

    def _layers(self) -> Layers:
        return Layers(nn.init.orthogonal_, self.spectral, rewritten=self.rewritten)


def embedding(spec: Spec, length: int) -> nn.Embedding | None:
    """Of the class, for all norms; orthogonal."""
    if not spec.classes:
        return None
    shared = nn.Embedding(spec.classes, length)
    nn.init.orthogonal_(shared.weight)
    return shared
