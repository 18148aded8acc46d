"""No augmentation."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from paragan.core.rng import Draw
from paragan.core.schema import record


@record
class Unchanged:
    """D sees images as they are."""

    name: Literal["none"] = "none"

    def __call__(self, images: Tensor, draw: Draw, stream: str, chance: Tensor | None) -> Tensor:
        return images
