"""The mapping network of style-based generators (Karras et al. 2019, "StyleGAN", section 2): latents to styles."""

import itertools

import torch
from torch import Tensor, nn

from paragan.core.running_mean import RunningMean
from paragan.nets.conditioning import require_labels
from paragan.nets.equalized import EqualizedLinear, leaky_relu


class MappingNetwork(nn.Module):
    """z [N, latent], y int64 [N] -> w [N, style]. Both inputs are normalised to a mean square of 1.

    `average` follows the mean of w over training images; `truncate` pulls towards it.

    Args:
        latent: length of z.
        style: length of w.
        layers: each is linear with a leaky ReLU.
        lr_multiplier: on the learning rate of the layers.
        decay: of the mean of w per step.
        classes: 0: unconditional; y is ignored.
        embedding: length of the class embedding.
    """

    def __init__(
        self, latent: int, style: int, *, layers: int, lr_multiplier: float, decay: float, classes: int, embedding: int
    ):
        super().__init__()
        self.average = RunningMean(decay, style)
        self.embedding = nn.Embedding(classes, embedding) if classes else None
        widths = [latent + (embedding if classes else 0), *[style] * layers]
        self.layers = nn.ModuleList(
            [EqualizedLinear(a, b, lr_multiplier=lr_multiplier) for a, b in itertools.pairwise(widths)]
        )

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        with torch.autocast(z.device.type, enabled=False):  # in full precision, as published
            x = normalize_mean_square(z)
            if self.embedding is not None:
                x = torch.cat([x, normalize_mean_square(self.embedding(require_labels(y)).to(z.dtype))], 1)
            for layer in self.layers:
                x = leaky_relu(layer(x))
        self.average(x)
        return x

    def truncate(self, ws: Tensor, truncation: float) -> Tensor:
        """Pull styles [..., style] towards their mean: 1 leaves them, 0 is the mean."""
        return torch.lerp(self.average.mean.to(ws.dtype), ws, truncation)


def normalize_mean_square(x: Tensor) -> Tensor:
    """Scale the rows of x [N, C] to a mean square of 1."""
    return x * (x.square().mean(1, keepdim=True) + 1e-8).rsqrt()
