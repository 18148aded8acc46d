"""PatchGAN: a convolutional discriminator that returns a logit for every patch of an image, at one or more scales.

Isola et al., "Image-to-Image Translation with Conditional Adversarial Networks", 2017 (arXiv:1611.07004); several
scales: Wang et al., "High-Resolution Image Synthesis and Semantic Manipulation with Conditional GANs", 2018
(arXiv:1711.11585). Departure: no batch norm by default, so that gradient penalties and single images are exact.
"""

from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.core.types import DiscriminatorOutput
from paragan.nets.ensemble import DiscriminatorEnsemble
from paragan.nets.layers import group_norm
from paragan.nets.memory_format import FlattenCL, MemoryFormat
from paragan.nets.spec import Spec
from paragan.nets.spectral_norm import add_spectral_norm

PatchNorm = Literal["none", "spectral", "group"]
MAX_MULTIPLE = 8  # of `width`, in the widest layer


@config_class
class PatchGANConfig:
    """Fields of families whose G is given data and whose D is a PatchGAN."""

    name: str = ""
    """Name of the family of networks."""
    d_width: Annotated[int, Field(ge=1)] = 32
    """Channels of D after its first layer; they double with each, up to 8 times as many."""
    d_layers: Annotated[int, Field(ge=1)] = 2
    """Layers of stride 2 in D: with 2, its patches have 34 x 34 pixels, with 3, 70 x 70."""
    d_norm: PatchNorm = "none"
    """Norm in D."""

    latent: ClassVar[int] = 0
    d_conditioning: ClassVar[Literal["none"]] = "none"
    default_d_conditioning: ClassVar[Literal["none"]] = "none"

    @property
    def spectral(self) -> bool:
        """True if the discriminator has spectral norm."""
        return self.d_norm == "spectral"


class PatchDiscriminator(nn.Module):
    """Images [N, C, H, W], y unused -> `DiscriminatorOutput`: logits [N, P], P = h w patches row by row, and features.

    `layers` convolutions of stride 2 and two of stride 1, all 4x4: with 3 layers a patch has 70 x 70 pixels, with 2 it
    has 34, with 1 it has 16. `features` are the maps after every leaky ReLU.

    Args:
        channels: of the images.
        width: channels after the first layer; they double with each, up to 8 times as many.
        layers: convolutions of stride 2.
        norm: of all layers but the first and the last: none, group norm, or spectral norm (of all layers).
        poolings: times that images are averaged to half their size first.
    """

    def __init__(self, channels: int, width: int = 64, layers: int = 3, norm: PatchNorm = "none", poolings: int = 0):
        super().__init__()
        self.poolings = poolings
        self.input_format = MemoryFormat()
        widths = [width * min(1 << i, MAX_MULTIPLE) for i in range(layers + 1)]
        stages = [_stage(channels, widths[0], 2, "spectral" if norm == "spectral" else "none")]
        for i in range(layers):
            stages.append(_stage(widths[i], widths[i + 1], 2 if i + 1 < layers else 1, norm))
        self.stages = nn.ModuleList(stages)
        self.logits = _conv(widths[-1], 1, 1, norm)
        self.flatten = FlattenCL()

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        for _ in range(self.poolings):
            x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
        h = self.input_format(x)
        features: list[Tensor] = []
        for stage in self.stages:
            h = stage(h)
            features.append(h)
        logits = self.flatten(self.logits(h))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return DiscriminatorOutput(logits, features=tuple(features))


def multi_scale_discriminator(
    channels: int, scales: int = 2, width: int = 64, layers: int = 3, norm: PatchNorm = "none"
) -> nn.Module:
    """Return a `PatchDiscriminator` for images of the full size, of half of it, ... (Wang et al. 2018).

    Args:
        channels: of the images.
        scales: number of discriminators.
        width, layers, norm: of each, as of `PatchDiscriminator`.
    """
    return DiscriminatorEnsemble(PatchDiscriminator(channels, width, layers, norm, i) for i in range(scales))


def smallest_image(layers: int, scales: int = 1) -> int:
    """Return the least side of images, pixels, of which every scale has a patch."""
    return 3 << (layers + scales - 1)


def check_patches(spec: Spec, layers: int, scales: int = 1) -> None:
    """Raise `UsageError` if images are too small for a patch at every scale."""
    side = spec.size.short_side
    if side >= smallest_image(layers, scales):
        return
    fitting = max((n for n in range(1, layers) if side >= smallest_image(n, scales)), default=0)
    fewer = f"nets.d_layers={fitting}" if fitting else "nets.d_layers=1 and nets.d_scales=1"
    raise UsageError(
        f"nets.d_layers={layers}: in {spec.size} no patch fits at scale {scales} of D. Use {fewer} or "
        f"data.resolution={smallest_image(layers, scales)}"
    )


def _stage(a: int, b: int, stride: int, norm: PatchNorm) -> nn.Module:
    norms = [group_norm(b)] if norm == "group" else []
    return nn.Sequential(_conv(a, b, stride, norm), *norms, nn.LeakyReLU(0.2, inplace=True))


def _conv(a: int, b: int, stride: int, norm: PatchNorm) -> nn.Module:
    """Return a 4x4 convolution, initialised as in the paper: N(0, 0.02)."""
    layer = nn.Conv2d(a, b, 4, stride, padding=1)
    nn.init.normal_(layer.weight, 0, 0.02)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return add_spectral_norm(layer) if norm == "spectral" else layer
