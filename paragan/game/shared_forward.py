"""One forward pass of G for both turns of a round.

Where G is given its input (the images of an autoencoder), both turns of a round run it on the same input, and D's step
does not change it. D then judges the images that G's turn goes on to differentiate, which is exact: G's turn calls D as
it is after its step, on the images of the same pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paragan.core.types import Batch

if TYPE_CHECKING:
    from paragan.game.game import Game


class SharedForward:
    """Generates fakes in D's turn, with the graph that G's turn differentiates. A round has one pass of each turn."""

    def __init__(self, game: Game):
        self.game = game
        self._fake: tuple[Batch, Batch] | None = None  # the micro-batch, and the fakes with their graph

    def fakes_for_d(self, micro_batch: Batch, step: int) -> Batch:
        """Generate the fakes of a micro-batch; D gets them without their graph."""
        game = self.game
        with torch.enable_grad(), game.g.requiring_grad(), game.g.tracking_moments():
            fake = game.generate(micro_batch, "G")
        self._fake = micro_batch, fake
        fields = {name: x.detach() if isinstance(x, torch.Tensor) else x for name, x in fake.fields.items()}
        return replace(fake, images=fake.images.detach(), fields=fields)

    def fakes_for_g(self, micro_batch: Batch) -> Batch:
        """Return the fakes of D's turn, once; generate them if D had no turn."""
        shared = self._fake
        self._fake = None
        if shared and shared[0] is micro_batch:
            return shared[1]
        return self.game.generate(micro_batch, "G")
