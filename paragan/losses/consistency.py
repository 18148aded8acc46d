"""D should say the same of images that differ in what does not matter."""

from __future__ import annotations

import torch
from torch import Tensor

from paragan.core.rng import Draw
from paragan.core.types import Batch, Net, judged
from paragan.losses.augment.translate import moved


def unlike(said: Tensor, again: Tensor) -> Tensor:
    """E |D(x) - D(x')|^2 of two [N] logits (Zhang et al. 2020, at the last layer). Scalar."""
    return (said - again).square().mean()


def of_moved(d: Net, batch: Batch, said: Tensor, stream: str) -> Tensor:
    """How otherwise D judges the same images, mirrored and shifted a little. Scalar."""
    return unlike(said, judged(d, mirrored_and_shifted(batch.images.detach(), batch.draw, stream), batch.labels).logits)


def of_nearby(d: Net, fake: Batch, said: Tensor) -> Tensor:
    """How otherwise D judges fakes of nearby latents (zCR, Zhao et al. 2021, L_dis). Scalar."""
    assert fake.nearby is not None, "the game was not asked for them: Objective.nearby"
    return unlike(said, judged(d, fake.nearby, fake.labels).logits)


def spread(fake: Batch) -> Tensor:
    """How far G moves its images when latents move a little, a mean over pixels (zCR's L_gen with its sign turned)."""
    assert fake.nearby is not None, "the game was not asked for them: Objective.nearby"
    return (fake.images.float() - fake.nearby.float()).square().mean()


def mirrored_and_shifted(images: Tensor, draw: Draw, stream: str) -> Tensor:
    """[N, C, H, W]: every second one left to right, by chance, and each shifted by up to an eighth either way; what
    comes in from outside is the image, reflected."""
    u = draw.uniform(stream, 3)
    images = torch.where((u[:, 0] < 0.5)[:, None, None, None], images.flip(3), images)
    height, width = (max(1, size // 8) for size in images.shape[2:])
    down, right = (((2 * most + 1) * u[:, i]).floor().long() - most for i, most in ((1, height), (2, width)))
    return moved(images, down, right, reflected=True)
