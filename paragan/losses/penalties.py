"""What is added to D's loss for its slopes and its logits, and to a player's for its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paragan.core.types import Batch, DiscriminatorFn, run_discriminator

CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def grad_norm_squared(logits: Tensor, images: Tensor) -> Tensor:
    """E |grad_x D(x)|^2 (Mescheder et al. 2018, eq. 9, without gamma / 2): R1 on reals, R2 on fakes. Scalar.

    Takes the logits that D gave for `images`, which require a gradient: no second pass through D.
    """
    return _logit_gradients(logits, images).square().sum(1).mean()


def gradient_penalty(d: DiscriminatorFn, real: Batch, fake: Batch) -> Tensor:
    """E (|grad_x D(x)| - 1)^2 between reals and fakes (Gulrajani et al. 2017, eq. 3, without lambda). Scalar."""
    x = real.images.detach()
    alpha = real.rng.uniform("gradient penalty", *[1] * (x.dim() - 1)).to(x.dtype)
    between = torch.lerp(x, fake.images.detach().to(x.dtype), alpha)
    between.requires_grad_(True)
    slope = _logit_gradients(run_discriminator(d, between, real.labels).logits, between)
    return ((slope.square().sum(1) + 1e-12).sqrt() - 1).square().mean()


def _logit_gradients(logits: Tensor, images: Tensor) -> Tensor:
    """[N, CHW] the gradient of every logit with respect to its image."""
    (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return slope.flatten(1)


def lecam_penalty(on_real: Tensor, on_fake: Tensor, ema_logits: Tensor) -> Tensor:
    """E (D(x) - a_F)^2 + E (D(G(z)) - a_R)^2 (LeCam, Tseng et al. 2021). Scalar.

    anchors: [2] running means of D's logits on reals and on fakes. As in the paper; the authors' code counts a logit
    only where it is beyond its anchor.
    """
    return (on_real - ema_logits[1]).square().mean() + (on_fake - ema_logits[0]).square().mean()


def orthogonal_penalty(net: nn.Module) -> Tensor:
    """Sum over layers of |W W^T * (1 - I)|^2, W being [filters, weights of one] (Brock et al. 2019, eq. 3). Scalar.

    The squared products of different filters, whose lengths stay free. Of a weight with a spectral norm it is the one
    that moves. Embeddings have no filters, and are left out.
    """
    return torch.stack([_off_diagonal(w) for w in _filters(net)]).sum()


def _off_diagonal(weight: Tensor) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        products = weight @ weight.mT
    itself = torch.eye(len(products), dtype=torch.bool, device=weight.device)
    return products.masked_fill(itself, 0).square().sum()


def _filters(net: nn.Module) -> Iterator[Tensor]:
    """[filters, weights of one] of every linear and convolutional layer."""
    for layer in net.modules():
        if isinstance(layer, CONVOLUTIONS | TRANSPOSED | nn.Linear):
            turned = isinstance(layer, TRANSPOSED)  # [in, out, ...]
            for weight in layer.parameters():
                if weight.dim() > 1:
                    yield (weight.transpose(0, 1) if turned else weight).flatten(1)
