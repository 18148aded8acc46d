"""Losses compared with their formulas, penalties with finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.losses.adversarial import Adversarial
from paragan.losses.gan_losses import GAN_LOSSES
from paragan.losses.penalties import grad_norm_squared, gradient_penalty


def batch(seed, n=6):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 1, 3, 3, generator=generator, dtype=torch.float64)
    return Batch(images, None, LaneRng(0, 0, (0,), n))


def critic():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.Softplus(), nn.Linear(16, 1)).double()
    return lambda x, y: net(x).squeeze(1)


def test_losses_equal_their_formulas():
    real, fake = torch.tensor([2.0, -1.0]), torch.tensor([0.5, -3.0])
    sigmoid = torch.sigmoid
    expected = {
        "hinge": ((1 - real).clamp(0) + (1 + fake).clamp(0), -fake),
        "nonsaturating": (-sigmoid(real).log() - (1 - sigmoid(fake)).log(), -sigmoid(fake).log()),
        "least_squares": (0.5 * (real - 1) ** 2 + 0.5 * fake**2, 0.5 * (fake - 1) ** 2),
        "wasserstein": (fake - real, -fake),
        "relativistic": (-sigmoid(real - fake).log(), -sigmoid(fake - real).log()),
    }
    assert expected.keys() == GAN_LOSSES.keys()
    for name, (d, g) in expected.items():
        torch.testing.assert_close(GAN_LOSSES[name].d(real, fake), d)
        torch.testing.assert_close(GAN_LOSSES[name].g(real, fake), g)


def numeric_gradients(d, x, eps=1e-6):
    """Return gradients [N, 9] by central differences."""
    out = torch.zeros(len(x), 9, dtype=x.dtype)
    for i in range(9):
        step = torch.zeros(9, dtype=x.dtype)
        step[i] = eps
        step = step.view(1, 1, 3, 3)
        out[:, i] = (d(x + step, None) - d(x - step, None)).detach() / (2 * eps)
    return out


def test_r1_is_the_squared_gradient_norm_on_reals():
    d = critic()
    real = batch(1)
    expected = numeric_gradients(d, real.images).square().sum(1).mean()
    images = real.images.clone().requires_grad_(True)
    torch.testing.assert_close(grad_norm_squared(d(images, None), images).double(), expected, rtol=1e-5, atol=0)


def test_gradient_penalty_interpolates_reals_and_fakes():
    d = critic()
    real = batch(1)
    fake = batch(2)
    alpha = real.rng.uniform("gradient penalty", 1, 1, 1).double()
    between = real.images + alpha * (fake.images - real.images)
    expected = (numeric_gradients(d, between).norm(dim=1) - 1).square().mean()
    torch.testing.assert_close(gradient_penalty(d, real, fake).double(), expected, rtol=1e-5, atol=0)


def test_lazy_r1_has_the_same_weight():
    d = critic()
    real = batch(1)
    fake = batch(2)
    plain = Adversarial("wasserstein").discriminator(d, real, fake, 0).total
    every = [Adversarial("wasserstein", r1=3).discriminator(d, real, fake, s).total - plain for s in range(4)]
    seldom = Adversarial("wasserstein", r1=3, r1_every=4)
    lazy = [seldom.discriminator(d, real, fake, s).total - plain for s in range(4)]
    torch.testing.assert_close(sum(lazy), sum(every))
    assert lazy[1] == lazy[2] == lazy[3] == 0


@pytest.mark.parametrize("loss", GAN_LOSSES)
def test_losses_of_the_players_have_opposite_gradients(loss):
    """A step of each player moves the fake logits in the opposite direction."""
    objective = Adversarial(loss)
    real = batch(1)
    shift = torch.zeros((), dtype=torch.float64, requires_grad=True)
    d = lambda x, y: x.flatten(1).mean(1) + 0.5 + shift  # noqa: E731
    fake = Batch(batch(2).images, None, real.rng)
    (of_g,) = torch.autograd.grad(objective.generator(d, fake, real, 0).total, shift)
    (of_d,) = torch.autograd.grad(
        objective.discriminator(lambda x, y: d(x, y) if x is fake.images else d(x, y).detach(), real, fake, 0).total,
        shift,
    )
    assert of_g < 0 < of_d
