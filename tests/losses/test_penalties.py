"""Penalties on gradients and logits of D, and on the weights of both players."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.losses.adversarial import Adversarial
from paragan.losses.penalties import lecam_penalty, orthogonal_penalty
from paragan.losses.running_state import attach_state
from paragan.nets import DCGAN, SNGAN, Spec
from paragan.nets.spectral_norm import train_mode


def batch(seed, n=6, size=3, kind=torch.float64):
    images = torch.randn(n, 1, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Batch(images.to(kind), None, LaneRng(0, 0, (0,), n))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(9, 16), nn.Softplus(), nn.Linear(16, 1)).double()

    def forward(self, x, y=None):
        return self.body(x).squeeze(1)


@pytest.mark.parametrize("name", ["r1", "r2", "gp"])
def test_weight_gradients_match_finite_differences(name):
    d = Critic()
    real = batch(1)
    fake = batch(2)
    objective, plain = Adversarial(**{name: 7.0}), Adversarial()

    def adds():
        return objective.discriminator(d, real, fake, 0).total - plain.discriminator(d, real, fake, 0).total

    parameters = list(d.parameters())
    grads = torch.autograd.grad(adds(), parameters, allow_unused=True)
    direction = [torch.randn_like(p) for p in parameters]
    exact = sum((g * w).sum() for g, w in zip(grads, direction) if g is not None)

    def penalty_at(by):
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=by)
        value = adds().detach()
        with torch.no_grad():
            torch._foreach_add_(parameters, direction, alpha=-by)
        return value

    torch.testing.assert_close((penalty_at(1e-6) - penalty_at(-1e-6)) / 2e-6, exact, rtol=1e-6, atol=1e-9)


def test_r2_is_r1_on_fakes():
    d = Critic()
    real = batch(1)
    fake = batch(2)
    one = Adversarial("wasserstein", r1=3.0).discriminator(d, fake, real, 0)
    other = Adversarial("wasserstein", r2=3.0).discriminator(d, real, fake, 0)
    torch.testing.assert_close(one.parts["D/r1"], other.parts["D/r2"])


def test_r1_and_r2_have_separate_intervals():
    d = Critic()
    real = batch(1)
    fake = batch(2)
    objective = Adversarial(r1=1.0, r1_every=2, r2=1.0, r2_every=3)
    parts_per_step = [objective.discriminator(d, real, fake, step).parts.keys() for step in range(6)]
    assert [("D/r1" in parts, "D/r2" in parts) for parts in parts_per_step] == [
        (s % 2 == 0, s % 3 == 0) for s in range(6)
    ]


@pytest.mark.parametrize("nets", [DCGAN(width=16), SNGAN(width=16)], ids=["dcgan", "sngan"])
@pytest.mark.parametrize("name", ["r1", "r2", "gp"])
def test_bf16_is_close_to_float32(nets, name):
    torch.manual_seed(0)
    d = train_mode(nets.discriminator(Spec(16, 1)))
    real, fake = (batch(seed, 32, 16, torch.float32) for seed in (1, 2))
    objective = Adversarial(**{name: 1.0})
    exact = objective.discriminator(d, real, fake, 0).parts[f"D/{name}"]
    with torch.autocast("cpu", torch.bfloat16):
        loss = objective.discriminator(d, real, fake, 0)
        loss.total.backward()
    assert loss.total.dtype == torch.float32
    assert float(loss.parts[f"D/{name}"]) == pytest.approx(float(exact), rel=0.05)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in d.parameters())


def test_lecam_pulls_logits_towards_the_mean_of_the_other_side():
    real, fake, ema = torch.tensor([1.0, 3.0]), torch.tensor([-1.0, 0.0]), torch.tensor([2.0, -0.5])
    expected = ((1 + 0.5) ** 2 + (3 + 0.5) ** 2) / 2 + ((-1 - 2.0) ** 2 + (0 - 2.0) ** 2) / 2
    assert lecam_penalty(real, fake, ema).item() == pytest.approx(expected)


def test_lecam_starts_after_the_first_step():
    d = Critic()
    real = batch(1)
    fake = batch(2)
    objective = Adversarial(lecam=0.3)
    plain = Adversarial().discriminator(d, real, fake, 0).total
    attach_state(objective.make_state(6), d)
    ema = d.objective_state.lecam_ema
    ema.tracking = True
    assert torch.equal(objective.discriminator(d, real, fake, 0).total, plain)
    ema.apply_moments()
    on_real, on_fake = d(real.images), d(fake.images)
    torch.testing.assert_close(ema.means.double(), torch.stack([on_real.mean(), on_fake.mean()]), rtol=1e-6, atol=0)
    gap = lecam_penalty(on_real, on_fake, ema.means)
    torch.testing.assert_close(objective.discriminator(d, real, fake, 1).total, plain + 0.3 * gap)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Conv2d(2, 5, 3)
        self.c, self.d = nn.ConvTranspose2d(3, 2, 2), nn.Embedding(6, 6)


@torch.no_grad()
def test_orthogonal_penalty_sums_over_pairs_of_filters():
    torch.manual_seed(0)
    net = Layers().double()
    expected = 0.0
    for filters in (net.a.weight, net.b.weight, net.c.weight.transpose(0, 1)):
        for i, one in enumerate(filters):
            for k, other in enumerate(filters):
                expected += float((one * other).sum() ** 2) if i != k else 0.0
    assert orthogonal_penalty(net).item() == pytest.approx(expected)


def test_orthogonal_penalty_ignores_norms_and_uses_the_raw_weight():
    net = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    raw = net.parametrizations.weight.original
    with torch.no_grad():
        raw.copy_(torch.eye(3, 4) * torch.tensor([[1.0], [5.0], [9.0]]))
    assert orthogonal_penalty(net) == 0
    (grad,) = torch.autograd.grad(orthogonal_penalty(nn.Sequential(net)), raw)
    assert not grad.any()


def test_orthogonal_weights_of_g_and_d():
    net = Layers()
    objective = Adversarial(orthogonal=2.0)
    assert objective.weight_penalty("D", net) is None
    loss = objective.weight_penalty("G", net)
    torch.testing.assert_close(loss.total, 2 * orthogonal_penalty(net))
    assert list(loss.parts) == ["G/orthogonal"]
