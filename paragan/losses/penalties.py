"""Penalties on D's gradients and logits, and on the weights of either player."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from paragan.core.types import Batch, DiscriminatorFn, run_discriminator

CONVOLUTIONS = nn.Conv1d | nn.Conv2d | nn.Conv3d
TRANSPOSED = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


def grad_norm_squared(logits: Tensor, images: Tensor) -> Tensor:
    """Compute E |grad_x D(x)|^2 (Mescheder et al. 2018, eq. 9, without gamma / 2): R1 on reals, R2 on fakes. Scalar.

    Args:
        logits: D's logits [N] on `images`: no second pass through D is needed.
        images: [N, C, H, W], must require a gradient.
    """
    return _logit_gradients(logits, images).square().sum(1).mean()


def finite_difference_penalty(d: DiscriminatorFn, batch: Batch, logits: Tensor, sigma: float, stream: str) -> Tensor:
    """Estimate `grad_norm_squared` by E (D(x + sigma n) - D(x))^2 / sigma^2, with n normal. Scalar.

    The mean over n is |grad_x D(x)|^2 + O(sigma^2), so no gradient with respect to images is needed. Lin et al. 2025
    (APT) have it without the division by sigma^2, Lin et al. 2025 (Adversarial Flow Models) as here.

    Args:
        d: The discriminator.
        batch: The images x.
        logits: D's logits [N] on them.
        sigma: Standard deviation of the noise.
        stream: Name of the random stream of n.
    """
    x = batch.images.detach()
    noise = batch.rng.normal(stream, *x.shape[1:]).to(x.dtype)
    difference = run_discriminator(d, x + sigma * noise, batch.labels).image_logits - logits
    return (difference / sigma).square().mean()


def centering_penalty(on_real: Tensor, on_fake: Tensor) -> Tensor:
    """Compute E (D(x) + D(G(z)))^2 over pairs of logits (Lin et al. 2025, Adversarial Flow Models). Scalar."""
    return (on_real + on_fake).square().mean()


def gradient_penalty(d: DiscriminatorFn, real: Batch, fake: Batch) -> Tensor:
    """Compute E (|grad_x D(x)| - 1)^2 between reals and fakes (Gulrajani et al. 2017, eq. 3 without lambda). Scalar."""
    x = real.images.detach()
    alpha = real.rng.uniform("gradient penalty", *[1] * (x.dim() - 1)).to(x.dtype)
    between = torch.lerp(x, fake.images.detach().to(x.dtype), alpha)
    between.requires_grad_(True)
    gradients = _logit_gradients(run_discriminator(d, between, real.labels).image_logits, between)
    return ((gradients.square().sum(1) + 1e-12).sqrt() - 1).square().mean()


def _logit_gradients(logits: Tensor, images: Tensor) -> Tensor:
    """Return the gradient of every logit with respect to its image, [N, CHW]."""
    (gradients,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return gradients.flatten(1)


def lecam_penalty(on_real: Tensor, on_fake: Tensor, ema_logits: Tensor) -> Tensor:
    """Compute E (D(x) - a_F)^2 + E (D(G(z)) - a_R)^2 (LeCam, Tseng et al. 2021). Scalar.

    This is the paper's formula; the authors' code counts a logit only beyond its mean.

    Args:
        on_real: D's logits on reals [N].
        on_fake: D's logits on fakes [N].
        ema_logits: Running means [2] of D's logits on reals (a_R) and on fakes (a_F).
    """
    return (on_real - ema_logits[1]).square().mean() + (on_fake - ema_logits[0]).square().mean()


def orthogonal_penalty(net: nn.Module) -> Tensor:
    """Compute the sum over layers of |W W^T * (1 - I)|^2, with W [filters, weights of one] (Brock et al. 2019, eq. 3).

    These are the squared inner products of different filters; their norms are not penalised. For a weight with spectral
    norm, W is the parameter before normalisation. Embeddings have no filters and are left out. Scalar.
    """
    return torch.stack([_off_diagonal(w) for w in _filters(net)]).sum()


def _off_diagonal(weight: Tensor) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        products = weight @ weight.mT
    diagonal = torch.eye(len(products), dtype=torch.bool, device=weight.device)
    return products.masked_fill(diagonal, 0).square().sum()


def _filters(net: nn.Module) -> Iterator[Tensor]:
    """Yield the weights of linear and convolutional layers as [filters, weights of one]."""
    for layer in net.modules():
        if isinstance(layer, CONVOLUTIONS | TRANSPOSED | nn.Linear):
            is_transposed = isinstance(layer, TRANSPOSED)  # weight [in, out, ...]
            for weight in layer.parameters():
                if weight.dim() > 1:
                    yield (weight.transpose(0, 1) if is_transposed else weight).flatten(1)
