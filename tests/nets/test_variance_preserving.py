"""Denoisers of networks that were trained at timesteps, against the formulas of `diffusers`' samplers."""

from __future__ import annotations

import itertools

import diffusers
import pytest
import torch

from paragan.nets import DiffusersUNet, Spec
from paragan.nets.denoiser import Denoiser
from paragan.nets.variance_preserving import NoiseSchedule, VariancePreserving, schedule_sigmas

PREDICTIONS = ("epsilon", "v_prediction", "sample")
BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2")


class ConstantNetwork(torch.nn.Module):
    """Returns the same numbers whatever it is called with, and records the timesteps."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x, level, y=None):
        self.level = level
        return self.output


@pytest.mark.slow(after=6)
@pytest.mark.parametrize(("prediction", "betas"), list(itertools.product(PREDICTIONS, BETAS)))
@pytest.mark.parametrize("scheduler", [diffusers.DDIMScheduler, diffusers.DDPMScheduler])
def test_expected_images_are_those_of_the_samplers_at_every_timestep(prediction, betas, scheduler):
    config = DiffusersUNet(scheduler=NoiseSchedule(beta_schedule=betas, prediction_type=prediction))
    oracle = scheduler(beta_schedule=betas, prediction_type=prediction, clip_sample=False)
    oracle.set_timesteps(1000)
    sigmas = schedule_sigmas(config.alphas_cumprod())
    x, output = torch.randn(2, 1000, 1, 2, 2, dtype=torch.float64)
    network = ConstantNetwork(output)
    preconditioning = VariancePreserving(sigmas, prediction).double()
    denoiser = Denoiser(Spec(2, 1), config, network, preconditioning)
    a = (1 + sigmas**2).rsqrt()[:, None, None, None]
    images = denoiser.denoise(x / a, sigmas)
    torch.testing.assert_close(network.level, torch.arange(1000.0, dtype=torch.float64), atol=2e-3, rtol=0)
    for t in range(1000):
        expected = oracle.step(output[t : t + 1], t, x[t : t + 1]).pred_original_sample[0]
        torch.testing.assert_close(images[t], expected, rtol=1e-5, atol=1e-6 * max(1, float(sigmas[t])))


def test_betas_are_those_of_the_papers():
    linear = NoiseSchedule(num_train_timesteps=5, beta_start=0.1, beta_end=0.3)
    betas = torch.tensor([0.1, 0.15, 0.2, 0.25, 0.3])
    torch.testing.assert_close(DiffusersUNet(scheduler=linear).alphas_cumprod(), (1 - betas).cumprod(0))
    cosine = NoiseSchedule(num_train_timesteps=50, beta_schedule="squaredcos_cap_v2")  # Nichol and Dhariwal, 17
    t = torch.arange(1, 50, dtype=torch.float64) / 50
    f = ((t + 0.008) / 1.008 * torch.pi / 2).cos() ** 2 / torch.tensor(0.008 / 1.008 * torch.pi / 2).cos() ** 2
    alphas = DiffusersUNet(scheduler=cosine).alphas_cumprod().double()
    torch.testing.assert_close(alphas[:-1], f, rtol=1e-4, atol=1e-6)


def test_timesteps_between_and_beyond_those_of_the_schedule():
    """In proportion to ln sigma; the first or last one where the schedule has no such noise."""
    timesteps = VariancePreserving(torch.tensor([0.1, 0.4, 6.4]), "sample").timesteps
    sigma = torch.tensor([0.1, 0.2, 0.4, 0.8, 6.4, 0.01, 100.0])
    torch.testing.assert_close(timesteps(sigma), torch.tensor([0, 0.5, 1, 1.25, 2, 0, 2]))
