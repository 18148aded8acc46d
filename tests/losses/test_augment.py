"""Augmentation of images before D."""

from __future__ import annotations

import math

import pytest
import torch

from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.losses.adversarial import Adversarial
from paragan.losses.augment import ADA, DiffAugment
from paragan.losses.augment.ada import (
    NUM_NORMALS,
    NUM_UNIFORMS,
    AdaSampler,
    _hue_matrix,
    _inverse_affine,
    _recolor,
    _transform,
)
from paragan.losses.running_state import attach_state

DRAW = LaneRng(3, 64, (0, 5, 6), 4)
KINDS = pytest.mark.parametrize("augment", [DiffAugment(), ADA()], ids=["diffaugment", "ada"])
CHANNELS = pytest.mark.parametrize("channels", [1, 3])


def images(channels=3, size=16, kind=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, channels, size, size, generator=generator).to(kind)


@KINDS
@CHANNELS
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
def test_all_images_change_and_merged_lanes_equal_separate_lanes(augment, channels, kind):
    x = images(channels, kind=kind)
    probability = torch.tensor(0.9)
    output = augment(x, DRAW, "s", probability)
    assert output.shape == x.shape
    assert output.dtype == torch.promote_types(kind, torch.float32)
    assert all((a != b).any() for a, b in zip(output, x))
    for lane, part, merged in zip(DRAW.lanes, x.split(4), output.split(4)):
        separate = augment(part, LaneRng(3, 64, (lane,), 4), "s", probability)
        torch.testing.assert_close(separate, merged)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(augment(x, DRAW, "s", probability), output)


@KINDS
@CHANNELS
def test_gradient_matches_finite_differences(augment, channels):
    x = images(channels, 8, torch.float64).requires_grad_(True)
    w, direction = (torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    of = lambda x: (augment(x, DRAW, "s", torch.tensor(1.0)) * w).sum()  # noqa: E731
    (grad,) = torch.autograd.grad(of(x), x)
    with torch.no_grad():
        measured = (of(x + 1e-5 * direction) - of(x - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close((grad * direction).sum(), measured, rtol=1e-7, atol=1e-7)


def test_diffaugment_equals_the_paper():
    x = images()
    u = DRAW.uniform("s", 7)
    output = DiffAugment()(x, DRAW, "s", None)
    for image, actual, (b, s, c, i, j, k, m) in zip(x, output, u.tolist()):
        image = image + (b - 0.5)
        image = (image - image.mean(0)) * 2 * s + image.mean(0)
        image = (image - image.mean()) * (c + 0.5) + image.mean()
        down, right = int(5 * i) - 2, int(5 * j) - 2  # 16 px: by at most 2
        wide = torch.zeros(3, 20, 20)
        wide[:, 2 + down : 18 + down, 2 + right : 18 + right] = image
        image = wide[:, 2:18, 2:18].clone()
        top, left = int(17 * k) - 4, int(17 * m) - 4  # a square of 8 px around any pixel
        image[:, max(0, top) : max(0, top + 8), max(0, left) : max(0, left + 8)] = 0
        torch.testing.assert_close(actual, image)


def test_policy_selects_augmentations():
    x = images()
    assert DiffAugment(policy="cutout").policy == ("cutout",)
    cut = DiffAugment(policy="cutout")(x, DRAW, "s", None)
    assert torch.equal(cut[cut != 0], x[cut != 0])
    shifted = DiffAugment(policy=("translation",))(x, DRAW, "s", None)
    assert set(shifted[0].unique().tolist()) <= {0.0, *x[0].unique().tolist()}


def test_ada_with_probability_0_is_the_identity():
    x = images()
    torch.testing.assert_close(ADA()(x, DRAW, "s", torch.tensor(0.0)), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize("p", [0.2, 0.7])
def test_images_are_augmented_with_probability_p(p):
    draw = LaneRng(0, 0, (0,), 4000)
    sampler = AdaSampler(draw.uniform("u", NUM_UNIFORMS), draw.normal("n", NUM_NORMALS), torch.tensor(p))
    changed = sampler.maybe_apply(torch.ones(4000), 0.0)
    assert float(changed.mean()) == pytest.approx(p, abs=0.03)


def make_sampler(uniform, normal=(), p=1.0):
    """Make the sampler of one image with these numbers; the remaining ones have no effect."""
    row = [*uniform, *[2.0] * (NUM_UNIFORMS - len(uniform))]
    return AdaSampler(
        torch.tensor([row]), torch.tensor([[*normal, *[0.0] * (NUM_NORMALS - len(normal))]]), torch.tensor(p)
    )


def test_blits_copy_pixels():
    x = images(size=16)[:1]
    mirrored = _transform(x, make_sampler([0.7, 0.0]))  # the second half: mirror; then whether
    torch.testing.assert_close(mirrored, x.flip(3), atol=1e-5, rtol=0)
    turned = _transform(x, make_sampler([0.0, 2.0, 0.3, 0.0]))
    assert any(torch.allclose(turned, x.rot90(k, (2, 3)), atol=1e-4) for k in (1, 3))
    down = _transform(x, make_sampler([0.0, 2.0, 0.0, 2.0, 0.0, 2.0, 1.0, 0.0]))  # by 2 px along y
    torch.testing.assert_close(down[:, :, :14], x[:, :, 2:], atol=1e-4, rtol=0)


def test_stretching_and_rotation_preserve_area():
    """The determinant of all maps without isotropic scaling is 1."""
    draw = LaneRng(0, 0, (0,), 500)
    spared = torch.tensor([0.0, 1, 1, 1, 1, 1, 1, 1])
    sampler = AdaSampler(draw.uniform("u", NUM_UNIFORMS), draw.normal("n", NUM_NORMALS) * spared, torch.tensor(1.0))
    maps = _inverse_affine(images()[:1].expand(500, -1, -1, -1), sampler)
    torch.testing.assert_close(maps.det().abs(), torch.ones(500), atol=1e-4, rtol=0)


def test_images_that_are_not_square_are_rotated_in_pixels():
    """Half a turn is exact at any shape, and an eighth of a turn keeps distances: in pixels it is orthogonal."""
    x = torch.randn(1, 3, 8, 24)
    half_turn = make_sampler([0.0, 2.0, 0.5, 0.0])
    torch.testing.assert_close(_transform(x, half_turn), x.rot90(2, (2, 3)), atol=1e-4, rtol=0)
    sampler = make_sampler([*[0.0, 2.0] * 4, 2.0, 0.625, 0.0])  # only the first rotation
    (linear,) = _inverse_affine(x, sampler)[:, :2, :2]
    to_pixels = torch.diag(torch.tensor([24.0, 8.0]))
    in_pixels = to_pixels @ linear @ to_pixels.inverse()
    torch.testing.assert_close(in_pixels @ in_pixels.mT, torch.eye(2), atol=1e-5, rtol=0)
    assert (in_pixels - torch.eye(2)).abs().max() > 0.1


@KINDS
def test_other_numbers_of_channels_are_augmented(augment):
    x = images(5)
    output = augment(x, DRAW, "s", torch.tensor(0.9))
    assert output.shape == x.shape
    assert all((a != b).any() for a, b in zip(output, x))


def test_hue_rotates_about_the_grey_axis():
    turn = _hue_matrix(torch.tensor([0.3, 2 * math.pi / 3]))
    torch.testing.assert_close(turn @ turn.mT, torch.eye(3).expand(2, 3, 3), atol=1e-6, rtol=0)
    torch.testing.assert_close(turn @ torch.ones(3), torch.ones(2, 3))
    assert turn[1].round().sum() == 3  # a third of a turn: red to green to blue
    torch.testing.assert_close(turn[1] @ turn[1] @ turn[1], torch.eye(3), atol=1e-6, rtol=0)


@CHANNELS
def test_brightness_and_contrast(channels):
    x = images(channels)[:1]
    output = _recolor(x, make_sampler([0.0, 0.0], [0.5, 2.0]))
    torch.testing.assert_close(output, (x + 0.1) * 2)


def test_inversion_mirrors_brightness_and_preserves_hue():
    x = images()[:1]
    output = _recolor(x, make_sampler([2.0, 2.0, 0.9, 0.0]))
    torch.testing.assert_close(output.mean(1), -x.mean(1))
    torch.testing.assert_close(output - output.mean(1, keepdim=True), x - x.mean(1, keepdim=True))


class LinearD(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256 * 3, 1)

    def forward(self, x, y):
        self.inputs = [*getattr(self, "inputs", []), x]
        return self.layer(x.flatten(1)).squeeze(1)


@KINDS
def test_d_gets_only_augmented_images_in_both_turns(augment):
    d = LinearD()
    real = Batch(images(), None, DRAW)
    fake = Batch(images() / 2, None, DRAW)
    objective = Adversarial("nonsaturating", r1=1.0, gp=1.0, augment=augment)
    attach_state(objective.make_state(12), d)
    if isinstance(augment, ADA):
        d.objective_state.augment_probability.p.fill_(1.0)
    objective.discriminator(d, real, fake, 0)
    objective.generator(d, fake, real, 0)
    on_real, on_fake, between, in_g = d.inputs
    p = torch.tensor(1.0)
    torch.testing.assert_close(on_real, augment(real.images, DRAW, "augment/D/real", p))
    torch.testing.assert_close(on_fake, augment(fake.images, DRAW, "augment/D/fake", p))
    torch.testing.assert_close(in_g, augment(fake.images, DRAW, "augment/G/fake", p))
    alpha = DRAW.uniform("gradient penalty", 1, 1, 1)
    torch.testing.assert_close(between, on_real + alpha * (on_fake - on_real))


def test_relativistic_augments_reals_in_the_turn_of_g_too():
    d = LinearD()
    real = Batch(images(), None, DRAW)
    fake = Batch(images() / 2, None, DRAW)
    objective = Adversarial("relativistic", augment=DiffAugment())
    loss = objective.generator(d, fake, real, 0)
    on_fake, on_real = (d.layer(x.flatten(1)).squeeze(1) for x in d.inputs)
    torch.testing.assert_close(d.inputs[1], DiffAugment()(real.images, DRAW, "augment/G/real", None))
    torch.testing.assert_close(loss.total, torch.nn.functional.softplus(on_real - on_fake).mean())
