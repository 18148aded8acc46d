"""A discriminator that sees feature maps of a frozen, pretrained network, beside the images or in place of them.

Kumari, Zhang, Shechtman and Zhu, "Ensembling Off-the-shelf Models for GAN Training", 2022 (vision-aided GAN): beside.
Sauer, Chitta, Müller and Geiger, "Projected GANs Converge Faster", 2021: in place (`skip_images`), here without their
random mixing of maps. The loss is the sum over the network's own discriminator and one for each map.
"""

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from paragan.core.frozen_features import frozen_maps
from paragan.core.schema import config_class
from paragan.core.types import DiscriminatorOutput, run_discriminator
from paragan.nets.conditioning import require_labels
from paragan.nets.ensemble import join_outputs
from paragan.nets.layers import LayerFactory
from paragan.nets.spec import Spec

FIELD = "d_features.network"
LEAKY_RELU_SLOPE = 0.2


@config_class
class FeatureOptions:
    """Feature maps of a frozen network that D sees.

    network     : module:callable, which returns an nn.Module: images in [-1, 1] -> a list of maps; "": none
    taps        : names of the modules of the network whose outputs are the maps; (): what it returns
    skip_images : whether D sees the maps only, and the discriminator of `nets` is left out
    width       : channels of the layers on each map
    """

    network: str = ""
    taps: tuple[str, ...] = ()
    skip_images: bool = False
    width: Annotated[int, Field(ge=1)] = 64


class FeatureDiscriminator(nn.Module):
    """Images [N, C, H, W], y int64 [N] -> `DiscriminatorOutput` of all discriminators.

    The frozen network is no child: it is in no state_dict, optimizer or exchange.

    Args:
        base: the discriminator of the images; left out if `options.skip_images`.
        options: names the network.
        spec: of the images.
    """

    def __init__(self, base: nn.Module, options: FeatureOptions, spec: Spec):
        super().__init__()
        self.base = None if options.skip_images else base
        self.options = options
        with torch.no_grad():
            maps = self.maps(torch.zeros(1, *spec.shape))
        self.heads = nn.ModuleList(MapDiscriminator(m.shape[1], options.width, spec.classes) for m in maps)

    def maps(self, x: Tensor) -> list[Tensor]:
        """Return the feature maps [N, F, h, w] of images."""
        maps = frozen_maps(FIELD, self.options.network, x.float(), self.options.taps)
        return [m if m.dim() == 4 else m.flatten(1)[:, :, None, None] for m in maps]

    def forward(self, x: Tensor, y: Tensor | None = None) -> DiscriminatorOutput:
        outputs = [DiscriminatorOutput(head(m, y)) for head, m in zip(self.heads, self.maps(x), strict=True)]
        if self.base is None:
            return join_outputs(outputs)
        own = run_discriminator(self.base, x, y)
        own_logits = own.logits if own.logits.dim() > 1 else own.logits[:, None]
        joined = join_outputs([own._replace(logits=own_logits), *outputs])
        return joined._replace(class_logits=own.class_logits, embedding=own.embedding, proxies=own.proxies)


class MapDiscriminator(nn.Module):
    """A feature map [N, F, h, w], y int64 [N] -> logits [N, h w]: three convolutions, with projection on the class."""

    def __init__(self, channels: int, width: int, classes: int):
        super().__init__()
        layers = LayerFactory(lambda weight, gain: nn.init.orthogonal_(weight, gain), spectral=True)
        self.first = layers.conv(channels, width, 1)
        self.second = layers.conv(width, width, 3)
        self.logits = layers.conv(width, 1, 1)
        self.embedding = layers(nn.Embedding(classes, width)) if classes else None

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        h = F.leaky_relu(self.first(x), LEAKY_RELU_SLOPE)
        h = F.leaky_relu(self.second(h), LEAKY_RELU_SLOPE)
        logits = self.logits(h).flatten(1)
        if self.embedding is not None:
            logits = logits + (self.embedding(require_labels(y))[:, :, None] * h.flatten(2)).sum(1)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))
