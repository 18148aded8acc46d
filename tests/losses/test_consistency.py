"""Consistency regularization of D."""

from __future__ import annotations

import torch

from advice import advises
from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.losses.adversarial import Adversarial
from paragan.losses.consistency import random_flip_and_shift

DRAW = LaneRng(3, 64, (0, 5), 8)


def batch(seed, with_perturbed=False):
    generator = torch.Generator().manual_seed(seed)
    images, perturbed_images = (torch.randn(16, 1, 8, 8, generator=generator) for _ in range(2))
    return Batch(images, None, DRAW, perturbed=perturbed_images if with_perturbed else None)


def critic():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 1))
    return lambda x, y: net(x).squeeze(1)


def naive(image, flip, down, right):
    """Flip and shift an image [H, W] pixel by pixel, with reflection padding."""
    height, width = image.shape
    image = image.flip(1) if flip else image
    mirrored = lambda at, size: 2 * (size - 1) - abs(at) if abs(at) >= size else abs(at)  # noqa: E731
    return torch.stack(
        [
            torch.stack([image[mirrored(i - down, height), mirrored(j - right, width)] for j in range(width)])
            for i in range(height)
        ]
    )


def test_flip_and_shift_follow_the_random_numbers():
    x = batch(1).images
    u = DRAW.uniform("some", 3)
    for image, output, (flip, a, b) in zip(x, random_flip_and_shift(x, DRAW, "some"), u.tolist()):
        assert torch.equal(output[0], naive(image[0], flip < 0.5, int(3 * a) - 1, int(3 * b) - 1))


def difference(objective, d, real, fake):
    return objective.discriminator(d, real, fake, 0).total - Adversarial().discriminator(d, real, fake, 0).total


def test_one_of_cr_and_bcr_is_0_as_advised():
    with advises("objective.bcr=10: already includes objective.cr=5. Set one of them to 0"):
        Adversarial(cr=5.0, bcr=10.0).check()
    Adversarial(cr=0.0, bcr=10.0).check()
    Adversarial(cr=5.0, bcr=0.0).check()


def test_cr_uses_reals_and_bcr_also_fakes():
    d = critic()
    real = batch(1)
    fake = batch(2)

    def gap(b, which):
        augmented = random_flip_and_shift(b.images, DRAW, f"consistency/{which}")
        return (d(b.images, None) - d(augmented, None)).square().mean()

    of_reals, of_fakes = gap(real, "real"), gap(fake, "fake")
    torch.testing.assert_close(difference(Adversarial(cr=10.0), d, real, fake), 10 * of_reals)
    torch.testing.assert_close(difference(Adversarial(bcr=10.0), d, real, fake), 10 * (of_reals + of_fakes))


def test_zcr_of_d_and_of_g_have_opposite_signs():
    d = critic()
    real = batch(1)
    fake = batch(2, with_perturbed=True)
    objective = Adversarial(zcr=5.0, zcr_g=0.5)
    gap = (d(fake.images, None) - d(fake.perturbed, None)).square().mean()
    torch.testing.assert_close(difference(objective, d, real, fake), 5 * gap)
    adds = objective.generator(d, fake, real, 0).total - Adversarial().generator(d, fake, real, 0).total
    torch.testing.assert_close(adds, -0.5 * (fake.images - fake.perturbed).square().mean())


def test_perturbed_fakes_get_the_same_augmentation():
    d = critic()
    real = batch(1)
    fake = batch(2)
    fake = Batch(fake.images, None, DRAW, perturbed=fake.images.clone())
    loss = Adversarial(zcr=5.0, augment={"name": "diffaugment"}).discriminator(d, real, fake, 0)
    assert loss.parts["D/zcr"] == 0


def test_consistency_has_no_gradient_to_the_fakes():
    real, fake = batch(1), batch(2)
    fake.images.requires_grad_(True)
    d = critic()
    plain, bound = (
        torch.autograd.grad(o.generator(d, fake, real, 0).total, fake.images)[0]
        for o in (Adversarial(), Adversarial(bcr=10.0))
    )
    assert torch.equal(plain, bound)
