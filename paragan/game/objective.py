"""What the two players want."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from paragan.core.types import Batch, DiscriminatorFn, Loss


class Objective(Protocol):
    """The two losses. Nothing about devices, ranks or optimizers.

    d is called as judged(d, images [N, C, H, W], labels [N] or None) -> Verdict, whether it gives logits [N] or more
    (batch.py).
    """

    @property
    def second_order(self) -> bool:
        """Whether a loss differentiates D twice (R1, R2, gradient penalty)."""
        ...

    @property
    def latent_perturbation(self) -> float:
        """How far from its latents G makes its images a second time (`Batch.perturbed`); 0: it does not."""
        ...

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss: ...

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss: ...

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        """What is added to the loss of "G" or "D" for the weights of its network alone; None: nothing."""
        ...
