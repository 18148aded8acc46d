"""The exponential moving average of a player's parameters: the network to use."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from paragan.core.schema import config_class


@config_class
class EMAConfig:
    """How slowly the average follows: its half-life, in thousands of real images.

    While a run is young the half-life is at most `rampup` times the images seen so far (Karras et al. 2020,
    StyleGAN2's `ema_rampup`); rampup 0 means no ramp.
    """

    half_life_kimg: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    rampup: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05

    def decay(self, total_images: int, new_images: int) -> float:
        """How much of the old average stays after `moved` more images, `images` after the start."""
        half_life = 1000 * self.half_life_kimg
        if self.rampup > 0:
            half_life = min(half_life, total_images * self.rampup)
        return 0.5 ** (new_images / max(half_life, 1e-8))


class EMA:
    """One vector that follows another. Buffers are not averaged: averaged spectral-norm vectors explode."""

    def __init__(self, params: Tensor, config: EMAConfig):
        self.params, self.config = params.clone(), config

    @torch.no_grad()
    def update(self, params: Tensor, total_images: int, new_images: int) -> None:
        self.params.lerp_(params, 1 - self.config.decay(total_images, new_images))
