"""Denoisers whose network was trained on x_t = a x + b n with a^2 + b^2 = 1, at discrete timesteps t.

Ho, Jain and Abbeel 2020 (DDPM); Nichol and Dhariwal 2021 (the cosine schedule); Salimans and Ho 2022 (v). With
sigma = b / a and c_in = a = 1 / sqrt(1 + sigma^2), c_in (x + sigma n) is x_t. What the network returns says x:

    epsilon         n            x = (x_t - b n) / a      c_skip = 1      c_out = -sigma
    v_prediction    a n - b x    x = a x_t - b v          c_skip = a^2    c_out = -b
    sample          x                                     c_skip = 0      c_out = 1

c_noise is the timestep of sigma: between two timesteps in proportion to ln sigma, beyond their range the first or last
one (Karras et al. 2022, EDM, table 1: columns VP, where c_noise is continuous, and iDDPM, where it is the nearest).
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from paragan.core.schema import config_class
from paragan.nets.denoiser import Coefficients

Prediction = Literal["epsilon", "v_prediction", "sample"]
Beta = Annotated[float, Field(gt=0, lt=1)]


@config_class
class NoiseSchedule:
    """The noise of a DDPM, in the words of `diffusers`' schedulers.

    num_train_timesteps  : T
    beta_schedule        : how the variances beta_1 to beta_T of the steps grow
    beta_start, beta_end : the first and the last of them, but for the cosine schedule (squaredcos_cap_v2)
    prediction_type      : what the network returns
    """

    num_train_timesteps: Annotated[int, Field(ge=2, le=100_000)] = 1000
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "linear"
    beta_start: Beta = 0.0001
    beta_end: Beta = 0.02
    prediction_type: Prediction = "epsilon"


def schedule_sigmas(alphas_cumprod: Tensor) -> Tensor:
    """Return sigma = b / a of every timestep, [T] float64, from a^2 [T]."""
    signal = alphas_cumprod.double()
    return ((1 - signal) / signal).sqrt()


class VariancePreserving(nn.Module):
    """sigma [N] -> coefficients of a network that was trained at timesteps.

    sigmas     : of the timesteps, [T], growing
    prediction : what the network returns
    """

    log_sigmas: Tensor

    def __init__(self, sigmas: Tensor, prediction: Prediction):
        super().__init__()
        self.prediction = prediction
        self.register_buffer("log_sigmas", sigmas.log().float(), persistent=False)

    def forward(self, sigma: Tensor) -> Coefficients:
        scale = (1 + sigma.square()).rsqrt()
        if self.prediction == "epsilon":
            skip = torch.ones_like(sigma)
            out = -sigma
        elif self.prediction == "v_prediction":
            skip = scale.square()
            out = -sigma * scale
        else:
            skip = torch.zeros_like(sigma)
            out = torch.ones_like(sigma)
        return Coefficients(skip, out, scale, self.timesteps(sigma))

    def timesteps(self, sigma: Tensor) -> Tensor:
        """Return the timestep of every sigma [N], from 0 to T - 1, with fractions."""
        table = self.log_sigmas.to(sigma.dtype)
        log_sigma = sigma.log()
        below = (table <= log_sigma[:, None]).sum(1).clamp(1, len(table) - 1) - 1
        fraction = (log_sigma - table[below]) / (table[below + 1] - table[below])
        return below + fraction.clamp(0, 1)
