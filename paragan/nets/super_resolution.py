"""Super-resolution: a residual generator that enlarges images, trained against a PatchGAN.

Lim et al., "Enhanced Deep Residual Networks for Single Image Super-Resolution" (EDSR), 2017 (arXiv:1707.02921), and
Ledig et al., "Photo-Realistic Single Image Super-Resolution Using a GAN", 2017 (arXiv:1609.04802): residual blocks
without batch norm at the low resolution, then pixel shuffle. Departure: the result is added to the bicubic enlargement,
and the last layer starts at 0, so G begins there.
"""

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.image_shape import ImageSize
from paragan.core.schema import config_class
from paragan.core.types import Batch
from paragan.nets.degradation import degrade
from paragan.nets.memory_format import MemoryFormat
from paragan.nets.patchgan import PatchDiscriminator, PatchGANConfig, check_patches
from paragan.nets.spec import Spec


@config_class
class SuperResolution(PatchGANConfig):
    """Degraded images to images, for sides that `scale` divides. Labels are not used."""

    name: Literal["super-resolution"] = "super-resolution"
    """Name of the family of networks."""
    scale: Annotated[int, Field(ge=2)] = 2
    """Factor between the low resolution and that of the data."""
    width: Annotated[int, Field(ge=1)] = 32
    """Channels of G."""
    blocks: Annotated[int, Field(ge=1)] = 8
    """Residual blocks of G."""
    max_blur: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.6
    """Largest standard deviation of the blur of an input, pixels of the low resolution."""
    max_noise: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.04
    """Largest standard deviation of the noise of an input, where images are in [-1, 1]."""

    def generator(self, spec: Spec) -> nn.Module:
        """Build a generator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return ResidualUpscaler(spec.channels, self.scale, self.width, self.blocks)

    def discriminator(self, spec: Spec) -> nn.Module:
        """Build a discriminator for `spec`, initialised from torch's global RNG. Raises as `check` does."""
        self.check(spec)
        return PatchDiscriminator(spec.channels, self.d_width, self.d_layers, self.d_norm)

    def check(self, spec: Spec) -> None:
        """Raise `UsageError` if the resolution does not fit."""
        width, height = spec.size
        if width % self.scale or height % self.scale:
            nearest = ImageSize(*(max(1, round(side / self.scale)) * self.scale for side in spec.size))
            raise UsageError(
                f"nets.scale={self.scale}: does not divide {spec.size}. Use data.resolution={nearest.resolution}"
            )
        check_patches(spec, self.d_layers)

    def conditioning_input(self, real: Batch) -> Tensor:
        """Return the input of G: degraded images [N, C, H / scale, W / scale], drawn anew for every image."""
        return degrade(real.images, real.rng, self.scale, self.max_blur, self.max_noise)


class ResidualUpscaler(nn.Module):
    """Images [N, C, h, w] in [-1, 1], y unused -> images [N, C, h * scale, w * scale], dtype of the input, not bounded.

    Args:
        channels: of the images.
        scale: factor of the enlargement.
        width: channels of the blocks.
        blocks: number of residual blocks.
    """

    def __init__(self, channels: int, scale: int, width: int = 32, blocks: int = 8):
        super().__init__()
        self.scale = scale
        self.input_format = MemoryFormat()
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.Sequential(*(PlainResidualBlock(width) for _ in range(blocks)))
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.enlarge = nn.Conv2d(width, width * scale**2, 3, padding=1)
        self.image = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.zeros_(self.image.weight)
        assert self.image.bias is not None
        nn.init.zeros_(self.image.bias)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        first = self.first(self.input_format(x))
        h = first + self.middle(self.blocks(first))
        h = F.relu(F.pixel_shuffle(self.enlarge(h), self.scale), inplace=True)
        base = F.interpolate(x, scale_factor=float(self.scale), mode="bicubic")
        return base + self.image(h).to(base.dtype)

    @property
    def last_layer(self) -> Tensor:
        """Weight of the convolution that makes the images, for weights that follow its gradient."""
        return self.image.weight


class PlainResidualBlock(nn.Module):
    """[N, C, H, W] -> the same shape: x + conv(relu(conv(x)))."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(x), inplace=True))
