"""GAN training in plain PyTorch, as people write it: what paragan is measured against. Imports no paragan trainer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from paragan.nets.norm import ConditionalBatchNorm2d, LaneBatchNorm2d

# name: (D's loss on real and fake logits, G's loss on fake logits)
LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "hinge": (lambda real, fake: relu(1 - real) + relu(1 + fake), lambda fake: -fake),
    "nonsaturating": (lambda real, fake: softplus(-real) + softplus(fake), lambda fake: softplus(-fake)),
}


def r1(logits: Tensor, images: Tensor) -> Tensor:
    """E |grad_x D(x)|^2, from logits of images that want a gradient."""
    (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return slope.flatten(1).square().sum(1).mean()


class Norm(nn.BatchNorm2d):
    """torch's batch norm, called with labels that it ignores."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return super().forward(x)


class ConditionalNorm(nn.Module):
    """Batch norm with a gain and a bias per class."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.norm = Norm(channels, affine=False)
        self.gain, self.bias = nn.Embedding(classes, channels), nn.Embedding(classes, channels)
        nn.init.ones_(self.gain.weight)
        nn.init.zeros_(self.bias.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.gain(y)[:, :, None, None] * self.norm(x) + self.bias(y)[:, :, None, None]


def norms(net: nn.Module) -> nn.Module:
    """A paragan network with torch's batch norm in place of batch norm by lane; parameters stay as they are."""
    for module in net.modules():
        if type(module) is LaneBatchNorm2d:
            module.__class__ = Norm
        elif type(module) is ConditionalBatchNorm2d:
            module.__class__ = ConditionalNorm
    return net
