"""No augmentation."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from paragan.core.rng import LaneRng
from paragan.core.schema import config_class


@config_class
class NoAugment:
    """No augmentation."""

    name: Literal["none"] = "none"

    def __call__(self, images: Tensor, rng: LaneRng, stream: str, probability: Tensor | None) -> Tensor:
        """Return the images unchanged."""
        return images
