"""The objective: the losses of both players."""

from __future__ import annotations

from typing import Protocol

from torch import nn

from paragan.core.types import Batch, DiscriminatorFn, Loss


class Objective(Protocol):
    """The two losses, which know nothing of devices, ranks or optimizers.

    `d` is called with images [N, C, H, W] and labels [N] or None, and gives logits [N] or a `DiscriminatorOutput`
    (core/types.py).
    """

    @property
    def second_order(self) -> bool:
        """Whether a loss differentiates D twice (R1, R2, gradient penalty)."""
        ...

    @property
    def latent_perturbation(self) -> float:
        """The scale of the noise on latents from which G makes a second set of images (`Batch.perturbed`); 0: none."""
        ...

    @property
    def replayed_fields(self) -> tuple[str, ...]:
        """The fields [N, ...] of G's output, beside the images, that D's loss uses: buffers of fakes hold them."""
        ...

    @property
    def uses_fakes(self) -> bool:
        """Return whether the losses need fakes. If not, none are generated in G's turn."""
        ...

    def discriminator(self, d: DiscriminatorFn, real: Batch, fake: Batch, step: int) -> Loss:
        """Return the loss of D."""
        ...

    def generator(self, d: DiscriminatorFn, fake: Batch, real: Batch, step: int) -> Loss:
        """Return the loss of G. Where `fake.adversarial_weight` is 0, D must not be called."""
        ...

    def weight_penalty(self, player: str, net: nn.Module) -> Loss | None:
        """Return what the weights of "G" or "D" add to its loss, or None."""
        ...
