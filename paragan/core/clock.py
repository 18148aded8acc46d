"""Progress of a run. Time is counted in real images shown to the discriminator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Progress of a run.

    duration_images   : images after which the run is done
    step              : rounds played
    images            : real images D has seen (kimg * 1000)
    seconds           : time spent training, over all starts of the run
    rollbacks         : how often training went back to an earlier checkpoint and continued differently
    last_round_images : images of the last round
    """

    duration_images: int
    step: int = 0
    images: int = 0
    seconds: float = 0.0
    rollbacks: int = 0
    last_round_images: int = 0

    @property
    def kimg(self) -> float:
        """Thousands of real images D has seen."""
        return self.images / 1000

    @property
    def is_done(self) -> bool:
        """Whether the run has reached its duration."""
        return self.images >= self.duration_images

    def advance(self, images: int) -> None:
        """Count one round of `images` images."""
        self.step += 1
        self.images += images
        self.last_round_images = images

    def finish_now(self) -> None:
        """Make the run done at its present number of images."""
        self.duration_images = self.images

    def has_crossed(self, period_images: int) -> bool:
        """Return whether the last round passed a multiple of `period_images`; never if that is 0."""
        if period_images <= 0:
            return False
        return self.images // period_images > (self.images - self.last_round_images) // period_images
