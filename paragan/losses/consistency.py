"""D should say the same of images that differ in what does not matter."""

from __future__ import annotations

import torch
from torch import Tensor

from paragan.core.rng import LaneRng
from paragan.core.types import Batch, DiscriminatorFn, run_discriminator
from paragan.losses.augment.translate import translate


def mean_squared_difference(logits: Tensor, other_logits: Tensor) -> Tensor:
    """E |D(x) - D(x')|^2 of two [N] logits (Zhang et al. 2020, at the last layer). Scalar."""
    return (logits - other_logits).square().mean()


def augmentation_consistency(d: DiscriminatorFn, batch: Batch, logits: Tensor, stream: str) -> Tensor:
    """How otherwise D judges the same images, mirrored and shifted a little. Scalar."""
    return mean_squared_difference(
        logits,
        run_discriminator(d, random_flip_and_shift(batch.images.detach(), batch.rng, stream), batch.labels).logits,
    )


def latent_consistency(d: DiscriminatorFn, fake: Batch, logits: Tensor) -> Tensor:
    """How otherwise D judges fakes of nearby latents (zCR, Zhao et al. 2021, L_dis). Scalar."""
    assert fake.perturbed is not None, "the game was not asked for them: Objective.latent_perturbation"
    return mean_squared_difference(logits, run_discriminator(d, fake.perturbed, fake.labels).logits)


def latent_diversity(fake: Batch) -> Tensor:
    """How far G moves its images when latents move a little, a mean over pixels (zCR's L_gen with its sign turned)."""
    assert fake.perturbed is not None, "the game was not asked for them: Objective.latent_perturbation"
    return (fake.images.float() - fake.perturbed.float()).square().mean()


def random_flip_and_shift(images: Tensor, rng: LaneRng, stream: str) -> Tensor:
    """[N, C, H, W]: every second one left to right, by chance, and each shifted by up to an eighth either way; what
    comes in from outside is the image, reflected."""
    u = rng.uniform(stream, 3)
    images = torch.where((u[:, 0] < 0.5)[:, None, None, None], images.flip(3), images)
    height, width = (max(1, size // 8) for size in images.shape[2:])
    down, right = (((2 * most + 1) * u[:, i]).floor().long() - most for i, most in ((1, height), (2, width)))
    return translate(images, down, right, reflect=True)
