"""Class losses of D and G, compared with loops over images."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

from advice import advises
from paragan.core.rng import LaneRng
from paragan.core.types import Batch, DiscriminatorOutput, run_discriminator
from paragan.losses.adversarial import Adversarial
from paragan.losses.class_losses import classification_loss, contrastive_loss

LANES = (0, 1, 2)
N = 5  # images of each
Y = torch.tensor([0, 1, 0, 0, 2, 1, 1, 0, 2, 2, 0, 0, 0, 0, 0])


def random_output(requires_grad=False):
    generator = torch.Generator().manual_seed(0)
    x = normalize(torch.randn(len(LANES) * N, 6, generator=generator), dim=1)
    proxies = normalize(torch.randn(3, 6, generator=generator), dim=1)[Y]
    classes = torch.randn(len(x), 3, generator=generator)
    parts = (torch.zeros(len(x)), classes, x, proxies)
    return DiscriminatorOutput(*(part.requires_grad_(requires_grad) for part in parts))


def naive_2c(x, proxies, y, t):
    """Compute eq. 8 of Kang & Park 2020 for the images of one lane, one by one."""
    total = 0.0
    for i in range(len(x)):
        to_proxy = math.exp(float(x[i] @ proxies[i]) / t)
        above, below = to_proxy, to_proxy
        for k in range(len(x)):
            if k != i:
                pull = math.exp(float(x[i] @ x[k]) / t)
                below += pull
                above += pull if y[k] == y[i] else 0.0
        total -= math.log(above / below)
    return total / len(x)


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_2c_equals_a_double_loop_over_the_images_of_each_lane(temperature):
    v = random_output()
    lanes = [slice(i * N, (i + 1) * N) for i in range(len(LANES))]
    expected = sum(naive_2c(v.embedding[s], v.proxies[s], Y[s], temperature) for s in lanes) / len(LANES)
    assert contrastive_loss(v, Y, N, temperature).item() == pytest.approx(expected, rel=1e-5)


def test_2c_has_a_gradient_for_a_class_with_one_image():
    v = random_output(requires_grad=True)
    contrastive_loss(v, Y, N, 0.5).backward()
    assert v.embedding.grad.isfinite().all()
    assert v.proxies.grad[Y == 2].any()


def test_2c_of_bf16_embeddings_is_computed_in_float32():
    v = random_output()
    with torch.autocast("cpu", torch.bfloat16):
        loss = contrastive_loss(v, Y, N, 0.1)
    assert torch.equal(loss, contrastive_loss(v, Y, N, 0.1))


def test_classification_loss_is_a_mean_over_images():
    v = random_output()
    probability = v.class_logits.softmax(1)[torch.arange(len(Y)), Y]
    torch.testing.assert_close(classification_loss(v, Y), -probability.log().mean())


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.randn(len(Y), 1, 4, 4, generator=generator), Y, LaneRng(0, 0, LANES, N))


def logits_only_d(x, y):
    return x.mean((1, 2, 3))


def two_headed_d(x, y):
    """Return a discriminator with both heads."""
    flat = x.flatten(1)
    return DiscriminatorOutput(
        flat.mean(1), flat[:, :3], normalize(flat[:, :6], dim=1), normalize(flat.detach()[:, 6:12], dim=1)
    )


@pytest.mark.parametrize("name", ["classifier", "contrastive"])
def test_class_losses_of_d_and_g(name):
    real = batch(1)
    fake = batch(2)
    plain = Adversarial()
    objective = Adversarial(**{name: 0.5})
    of = {
        "classifier": lambda b: classification_loss(two_headed_d(b.images, Y), Y),
        "contrastive": lambda b: contrastive_loss(two_headed_d(b.images, Y), Y, N, 1.0),
    }[name]
    d_adds = (
        objective.discriminator(two_headed_d, real, fake, 0).total
        - plain.discriminator(two_headed_d, real, fake, 0).total
    )
    g_adds = objective.generator(two_headed_d, fake, real, 0).total - plain.generator(two_headed_d, fake, real, 0).total
    torch.testing.assert_close(d_adds, 0.5 * (of(real) + (of(fake) if name == "classifier" else 0)))
    torch.testing.assert_close(g_adds, 0.5 * of(fake))


@pytest.mark.parametrize("name", ["classifier", "contrastive"])
def test_a_d_with_logits_only_raises(name):
    real, fake = batch(1), batch(2)
    d = logits_only_d
    outputs = {"classifier": "class_logits=...", "contrastive": "embedding=..., proxies=..."}[name]
    objective = Adversarial(**{name: 1.0})
    for wrong, data in ((d, real), (two_headed_d, Batch(real.images, None, real.rng))):
        with advises(
            f". Use labels and a D that returns DiscriminatorOutput(logits, {outputs}), or objective.{name}=0"
        ):
            objective.discriminator(wrong, data, fake, 0)
    assert objective.discriminator(two_headed_d, real, fake, 0).total.isfinite()
    assert Adversarial(**{name: 0.0}).discriminator(d, real, fake, 0).total.isfinite()


def test_d_has_one_head_as_advised():
    with advises(
        "objective.classifier=1: D has one head, and objective.contrastive=2 needs another. Set one of them to 0"
    ):
        Adversarial(classifier=1.0, contrastive=2.0).check()
    Adversarial(classifier=0.0, contrastive=2.0).check()
    Adversarial(classifier=1.0, contrastive=0.0).check()


def test_concatenated_pass_equals_two_passes():
    real, fake = batch(1), batch(2)
    objective = Adversarial(classifier=1.0)
    one = objective.discriminator(two_headed_d, real, fake, 0, concat_real_fake=True)
    two = objective.discriminator(two_headed_d, real, fake, 0)
    assert one.parts.keys() == two.parts.keys()
    torch.testing.assert_close(one.total, two.total)
    assert run_discriminator(two_headed_d, real.images, Y).split(4)[1].proxies.shape == (len(Y) - 4, 6)
