"""Consistency terms: D's logits should not change under flips, shifts or small perturbations of latents."""

from __future__ import annotations

import torch
from torch import Tensor

from paragan.core.rng import LaneRng
from paragan.core.types import Batch, DiscriminatorFn, run_discriminator
from paragan.losses.augment.translate import translate


def mean_squared_difference(logits: Tensor, other_logits: Tensor) -> Tensor:
    """Compute E |D(x) - D(x')|^2 from two logits [N] (Zhang et al. 2020, at the last layer). Scalar."""
    return (logits - other_logits).square().mean()


def augmentation_consistency(d: DiscriminatorFn, batch: Batch, logits: Tensor, stream: str) -> Tensor:
    """Compare D's logits on the images with those on randomly flipped and shifted images. Scalar.

    Args:
        d: The discriminator.
        batch: The images.
        logits: D's logits [N] on `batch.images`.
        stream: Name of the random stream.
    """
    images = random_flip_and_shift(batch.images.detach(), batch.rng, stream)
    return mean_squared_difference(logits, run_discriminator(d, images, batch.labels).logits)


def latent_consistency(d: DiscriminatorFn, fake: Batch, logits: Tensor) -> Tensor:
    """Compare D's logits [N] on fakes with those on perturbed fakes (zCR, Zhao et al. 2021, L_dis). Scalar."""
    assert fake.perturbed is not None, "no perturbed fakes: latent_perturbation is 0"
    return mean_squared_difference(logits, run_discriminator(d, fake.perturbed, fake.labels).logits)


def latent_diversity(fake: Batch) -> Tensor:
    """Compute the mean squared change of G's pixels under perturbed latents: minus L_gen of zCR. Scalar."""
    assert fake.perturbed is not None, "no perturbed fakes: latent_perturbation is 0"
    return (fake.images.float() - fake.perturbed.float()).square().mean()


def random_flip_and_shift(images: Tensor, rng: LaneRng, stream: str) -> Tensor:
    """Flip each image [N, C, H, W] horizontally with probability 1/2; shift it by up to an eighth in each direction.

    Pixels beyond the edge are the image, reflected.
    """
    u = rng.uniform(stream, 3)
    images = torch.where((u[:, 0] < 0.5)[:, None, None, None], images.flip(3), images)
    height, width = (max(1, size // 8) for size in images.shape[2:])
    down, right = (((2 * most + 1) * u[:, i]).floor().long() - most for i, most in ((1, height), (2, width)))
    return translate(images, down, right, reflect=True)
