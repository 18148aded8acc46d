"""Time is counted in real images shown to the discriminator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Where a run stands. step: rounds played; images: real images D has seen (kimg * 1000), moved: in the last round;
    seconds: that playing them took, in all its sittings; rollbacks: how often it went back to a checkpoint, to go on in
    another way."""

    duration: int  # images
    step: int = 0
    images: int = 0
    seconds: float = 0.0
    rollbacks: int = 0
    moved: int = 0

    @property
    def kimg(self) -> float:
        return self.images / 1000

    @property
    def done(self) -> bool:
        return self.images >= self.duration

    def advance(self, images: int) -> None:
        self.step += 1
        self.images += images
        self.moved = images

    def end(self) -> None:
        """Let the run be done here."""
        self.duration = self.images

    def crossed(self, every: int) -> bool:
        """Whether the round just played passed a multiple of `every` images."""
        return every > 0 and self.images // every > (self.images - self.moved) // every
