"""What the two players want."""

from __future__ import annotations

from typing import Protocol

from ..batch import Batch, Loss, Net


class Objective(Protocol):
    """The two losses. Nothing about devices, ranks or optimizers.

    d is called as d(images [N, C, H, W], labels [N] or None) -> logits [N].
    """

    @property
    def second_order(self) -> bool:
        """Whether a loss differentiates D twice (R1, gradient penalty)."""
        ...

    def discriminator(self, d: Net, real: Batch, fake: Batch, step: int) -> Loss: ...

    def generator(self, d: Net, fake: Batch, real: Batch, step: int) -> Loss: ...
