"""Time is counted in real images shown to the discriminator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Where a run stands. step: rounds played; images: real images D has seen (kimg * 1000), moved: in the last round;
    seconds: that playing them took, in all its sittings; rollbacks: how often it went back to a checkpoint, to go on in
    another way."""

    duration_images: int  # images
    step: int = 0
    images: int = 0
    seconds: float = 0.0
    rollbacks: int = 0
    last_round_images: int = 0

    @property
    def kimg(self) -> float:
        return self.images / 1000

    @property
    def is_done(self) -> bool:
        return self.images >= self.duration_images

    def advance(self, images: int) -> None:
        self.step += 1
        self.images += images
        self.last_round_images = images

    def finish_now(self) -> None:
        """Let the run be done here."""
        self.duration_images = self.images

    def has_crossed(self, period_images: int) -> bool:
        """Whether the round just played passed a multiple of `every` images."""
        return (
            period_images > 0 and self.images // period_images > (self.images - self.last_round_images) // period_images
        )
