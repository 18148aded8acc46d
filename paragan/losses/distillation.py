"""Distillation: G also learns from a teacher (Aguinaldo et al. 2019, "joint loss").

G's loss gets the distance of its images to those that frozen per-label generators make from the same latents
(`Batch.latents`). `models/teacher.py` loads these generators when they are first used; checkpoints do not contain them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from paragan.core.types import Batch, DiscriminatorFn, Loss
from paragan.losses.adversarial import ObjectiveWrapper

TeacherFn = Callable[[Tensor, Tensor], Tensor]  # (latents [N, latent], labels [N]) -> images without a gradient


@dataclass(frozen=True)
class DistilledObjective(ObjectiveWrapper):
    """D's loss is unchanged; G minimises L_G + weight E|G(z, y) - teacher(z, y)|^2, a mean over pixels."""

    teacher: TeacherFn
    weight: float

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        assert fake.latents is not None
        assert fake.labels is not None
        loss = super().generator(d, fake, real, step)
        target = self.teacher(fake.latents, fake.labels)
        distance = (fake.images.float() - target.float()).square().mean()
        return Loss(loss.total + self.weight * distance, {**loss.parts, "G/distance": distance.detach()})
