"""EDM: preconditioning, the sampler on a distribution whose solution is known, and what the critic returns."""

import math

import pytest
import torch

from advice import advises
from paragan.core.noise_map import split_noise_map, with_noise_map
from paragan.core.types import DiscriminatorOutput
from paragan.nets import EDM, Spec
from paragan.nets.diffusion_sampler import noise_schedule, sample_heun

SMALL = EDM(widths=(8, 16), blocks=1, steps=3, critic="score")
SPEC = Spec(8, 3, classes=4)


def build(config=SMALL, spec=SPEC):
    torch.manual_seed(0)
    nets = config.generator(spec).double(), config.discriminator(spec).double()
    for net in nets:
        for p in net.parameters():  # some start at 0
            torch.nn.init.normal_(p, std=0.1)
    return nets


def test_preconditioning_is_table_1():
    g, _ = build()
    x, y = torch.randn(3, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 3])
    sigma = torch.tensor([0.01, 1.0, 40.0], dtype=torch.float64)
    s = sigma[:, None, None, None]
    skip, out = 0.25 / (s**2 + 0.25), s * 0.5 / (s**2 + 0.25) ** 0.5
    expected = skip * x + out * g.unet(x / (s**2 + 0.25) ** 0.5, sigma.log() / 4, y)
    torch.testing.assert_close(g.denoise(x, sigma, y), expected)


def test_schedule_is_equation_5():
    sigmas = noise_schedule(18, 0.002, 80.0)
    assert len(sigmas) == 19
    assert sigmas[0] == pytest.approx(80)
    assert sigmas[17] == pytest.approx(0.002)
    assert sigmas[18] == 0
    assert sigmas[5] == pytest.approx((80 ** (1 / 7) + 5 / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7)


def test_heun_solves_the_equation_of_normal_data():
    """The best denoiser of data with variance v is x v / (v + sigma^2). Twice the steps make a quarter of the error."""
    calls = []

    def denoise(x, sigma):
        calls.append(sigma)
        return x * 0.25 / (0.25 + sigma[:, None, None, None] ** 2)

    noise = torch.randn(4, 1, 2, 2, dtype=torch.float64)
    solution = noise * 80 * 0.5 / math.sqrt(0.25 + 80**2)
    errors = []
    for steps in (18, 36, 72):
        images = sample_heun(denoise, noise, noise_schedule(steps, 0.002, 80.0))
        errors.append(float(((images - solution) / solution).abs().max()))
    assert len(calls) == 35 + 71 + 143
    assert errors[0] < 0.06
    assert 3 < errors[0] / errors[1] < 6
    assert 3 < errors[1] / errors[2] < 6


def test_one_step_is_one_evaluation():
    g, _ = build(EDM(widths=(8, 16), blocks=1, steps=1))
    z, y = torch.randn(2, 192, dtype=torch.float64), torch.tensor([1, 2])
    noise = 80 * z.view(2, 3, 8, 8)
    torch.testing.assert_close(g(z, y), g.denoise(noise, torch.full((2,), 80.0, dtype=torch.float64), y))


def test_critic_returns_logits_and_expected_images():
    _, d = build()
    x, y = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([1, 2])
    sigma = torch.tensor([0.5, 2.0], dtype=torch.float64)
    packed = with_noise_map(x, sigma)
    torch.testing.assert_close(split_noise_map(packed), (x, sigma))
    out = d(packed, y)
    assert isinstance(out, DiscriminatorOutput)
    assert out.logits.shape == (2,)
    torch.testing.assert_close(out.features[0], d.denoiser.denoise(x, sigma, y))
    assert torch.equal(d(x, y).logits, d(with_noise_map(x, torch.full_like(sigma, 0.002)), y).logits)


def test_level_and_class_matter_and_images_do_not_couple():
    g, _ = build()
    x, y = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.tensor([1, 2])
    sigma = torch.tensor([0.5, 2.0], dtype=torch.float64)
    out = g.denoise(x, sigma, y)
    assert (out[0] - g.denoise(x, sigma * 2, y)[0]).abs().max() > 1e-6
    assert (out[0] - g.denoise(x, sigma, y * 0)[0]).abs().max() > 1e-6
    torch.testing.assert_close(g.denoise(x[:1], sigma[:1], y[:1]), out[:1])


def test_sizes_that_cannot_be_halved_are_refused():
    with advises("nets.widths=[64, 128, 128]: halve images 2 times, and 14 px cannot be. Use nets.widths=[64, 128]"):
        EDM().check(Spec(14, 1))
    EDM(widths=(64, 128)).check(Spec(14, 1))
    with advises("nets.sigma_min=100: must be below sigma_max=80. Use nets.sigma_min=0.002"):
        EDM(sigma_min=100).check(Spec(16, 1))
    EDM(sigma_min=0.002).check(Spec(16, 1))
