"""Time is counted in real images shown to the discriminator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Where a run stands. step: rounds played; images: real images D has seen (kimg * 1000); seconds: that playing them
    took, in all its sittings; rollbacks: how often it went back to a checkpoint, to go on in another way."""

    duration: int  # images
    step: int = 0
    images: int = 0
    seconds: float = 0.0
    rollbacks: int = 0

    @property
    def kimg(self) -> float:
        return self.images / 1000

    @property
    def done(self) -> bool:
        return self.images >= self.duration

    def advance(self, images: int) -> None:
        self.step += 1
        self.images += images

    def end(self) -> None:
        """Let the run be done here."""
        self.duration = self.images

    def crossed(self, every: int, images: int) -> bool:
        """Whether the round just played, of `images`, passed a multiple of `every` images."""
        return every > 0 and self.images // every > (self.images - images) // every
