"""When D starts to train, and the weight that its judgement has in the loss of G.

Tokenizers and codecs train G alone first, on a reconstruction (Esser et al. 2021, section 4: D starts after at least
one epoch).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class LateStart:
    """The start of D, in real images.

    images         : before so many, rounds have no turn of D, and G's loss must not call D
    warm_up_images : from then on, the weight of D in G's loss grows linearly to 1 over so many; 0: at once
    """

    images: int = 0
    warm_up_images: int = 0

    @staticmethod
    def never() -> LateStart:
        """Return that of a game in which D does not train."""
        return LateStart(images=sys.maxsize)

    def has_started(self, images: int) -> bool:
        """Return whether D trains in the round that begins after so many images."""
        return images >= self.images

    def weight(self, images: int) -> float:
        """Return the weight of D in G's loss, in the round that begins after so many images."""
        if not self.has_started(images):
            return 0.0
        return min(1.0, (images - self.images) / self.warm_up_images) if self.warm_up_images else 1.0
