"""The exponential moving average of a player's parameters, which is the network to use after training."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from paragan.core.schema import config_class


@config_class
class EMAConfig:
    """How slowly the average follows the parameters.

    half_life_kimg : half-life, in thousands of real images
    rampup         : the half-life is at most so many times the images seen so far (`ema_rampup` of Karras et al. 2020,
                     StyleGAN2); 0: no ramp
    """

    half_life_kimg: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    rampup: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.05

    def decay(self, total_images: int, new_images: int) -> float:
        """Return the weight of the old average after `new_images` more images, `total_images` after the start."""
        half_life = 1000 * self.half_life_kimg
        if self.rampup > 0:
            half_life = min(half_life, total_images * self.rampup)
        return 0.5 ** (new_images / max(half_life, 1e-8))


class EMA:
    """The average of one flat parameter vector. Buffers are not averaged: averaged spectral-norm vectors explode.

    params : [total] float32 where the parameters are bfloat16 or float16, which would round the small steps of an
             average to nothing; else of their dtype
    """

    def __init__(self, params: Tensor):
        self.params = params.detach().to(torch.promote_types(params.dtype, torch.float32), copy=True)

    @torch.no_grad()
    def update(self, params: Tensor, decay: float) -> None:
        """Move to `params` [total]. `decay` is the weight of the old average."""
        self.params.lerp_(params.to(self.params.dtype), 1 - decay)

    def copy_to(self, params: Tensor) -> None:
        """Write the average into `params` [total]."""
        params.copy_(self.params)

    def full_vector(self, is_receiver: bool = True) -> Tensor | None:
        """Return the average [total]; None for ranks that do not want it."""
        return self.params if is_receiver else None

    def is_finite(self) -> bool:
        """Return whether all its numbers are finite."""
        return bool(self.params.isfinite().all())
