"""Penalties on gradients and logits of D, and on the weights of both players."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from advice import advises
from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.losses.adversarial import Adversarial
from paragan.losses.penalties import centering_penalty, finite_difference_penalty, lecam_penalty, orthogonal_penalty
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


# R1 and R2 by finite differences ---------------------------------------------------------------------


def mean_over_draws(d, objective, draws, kind=torch.float64):
    """Return R1 and the gradient of D's weights, as a mean over draws of the noise."""
    values, gradients = [], []
    for draw in range(draws):
        real, fake = (dataclasses.replace(batch(seed, kind=kind), rng=LaneRng(0, 6 * draw, (0,), 6)) for seed in (1, 2))
        loss = objective.discriminator(d, real, fake, 0)
        values.append(loss.parts["D/r1"])
        plain = dataclasses.replace(objective, r1=0.0, r2=0.0).discriminator(d, real, fake, 0).total
        gradients.append(torch.autograd.grad(loss.total - plain, list(d.parameters()), allow_unused=True))
    return torch.stack(values).mean(), torch.cat(
        [torch.stack([g[i] for g in gradients]).mean(0).flatten() for i in range(len(gradients[0])) if i != 3]
    )  # the last bias has no gradient


class ConvCritic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Conv2d(1, 8, 3, padding=1), nn.Softplus(), nn.Conv2d(8, 4, 3), nn.Flatten())
        self.body = nn.Sequential(*layers).double()

    def forward(self, x, y=None):
        return self.body(x).sum(1)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("critic", [Critic, ConvCritic])
def test_finite_differences_agree_with_the_exact_penalty(critic):
    d = critic()
    exact, exact_gradient = mean_over_draws(d, Adversarial("wasserstein", r1=2.0), 1)
    estimate = Adversarial("wasserstein", r1=2.0, r1_r2_method="finite_difference", difference_sigma=1e-3)
    value, gradient = mean_over_draws(d, estimate, 1000)
    assert float(value) == pytest.approx(float(exact), rel=0.05)  # of 6,000 squares: 2 % is one deviation
    assert float(torch.cosine_similarity(gradient, exact_gradient, dim=0)) > 0.99
    assert float(gradient.norm() / exact_gradient.norm()) == pytest.approx(1, rel=0.05)


def test_a_linear_critic_has_no_error_but_that_of_the_draw():
    d = nn.Sequential(nn.Flatten(), nn.Linear(9, 1), nn.Flatten(0)).double()
    on = lambda x, y: d(x)  # noqa: E731
    x = batch(1)
    slope = d[1].weight[0]
    for sigma in (1e-3, 1.0):
        value = finite_difference_penalty(on, x, on(x.images, None), sigma, "finite difference/real")
        noise = x.rng.normal("finite difference/real", 1, 3, 3).double().flatten(1)
        torch.testing.assert_close(value, (noise @ slope).square().mean(), rtol=1e-6, atol=0)


def test_finite_differences_are_apts_penalty_divided_by_the_variance():
    d = Critic()
    x = batch(1)
    sigma = 0.1
    noisy = x.images + sigma * x.rng.normal("finite difference/real", 1, 3, 3)
    apt = (d(x.images) - d(noisy)).square().mean()
    objective = Adversarial(r1=1.0, r1_r2_method="finite_difference", difference_sigma=sigma)
    torch.testing.assert_close(objective.discriminator(d, x, batch(2), 0).parts["D/r1"], (apt / sigma**2).detach())


def test_finite_differences_need_no_second_derivative():
    class OnceOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, slope):
            return slope

    d = Critic()
    once = lambda x, y: OnceOnly.apply(d(x)).square()  # noqa: E731
    real, fake = batch(1), batch(2)
    exact, estimated = Adversarial(r1=1.0, r2=1.0), Adversarial(r1=1.0, r2=1.0, r1_r2_method="finite_difference")
    assert exact.second_order
    assert not estimated.second_order
    assert dataclasses.replace(estimated, gp=1.0).second_order
    estimated.discriminator(once, real, fake, 0).total.backward()
    assert all(p.grad.isfinite().all() for p in d.parameters())
    with pytest.raises(RuntimeError, match="once_differentiable"):
        exact.discriminator(once, real, fake, 0).total.backward()


@pytest.mark.parametrize("settings", [("r1", 1.0), ("r2", 1.0)])
def test_reals_and_fakes_in_one_call_have_the_same_estimate(settings):
    d = Critic()
    real, fake = batch(1), batch(2)
    objective = Adversarial(**dict([settings]), r1_r2_method="finite_difference")
    apart = objective.discriminator(d, real, fake, 0)
    calls = []
    together = objective.discriminator(lambda x, y: calls.append(len(x)) or d(x), real, fake, 0, concat_real_fake=True)
    torch.testing.assert_close(together.total, apart.total)
    assert calls == [12, 6]


def test_bf16_estimates_r1_where_the_noise_is_larger_than_its_rounding():
    torch.manual_seed(0)
    d = train_mode(SNGAN(width=16).discriminator(Spec(16, 1)))
    estimates = {}
    for sigma in (0.01, 0.1):
        objective = Adversarial(r1=1.0, r1_r2_method="finite_difference", difference_sigma=sigma)
        for precision in (torch.float32, torch.bfloat16):
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
                loss = objective.discriminator(d, batch(1, 64, 16, torch.float32), batch(2, 64, 16, torch.float32), 0)
            assert loss.total.dtype == torch.float32
            estimates[sigma, precision] = float(loss.parts["D/r1"])
    assert estimates[0.1, torch.bfloat16] == pytest.approx(estimates[0.1, torch.float32], rel=0.2)
    assert estimates[0.01, torch.bfloat16] > 1.5 * estimates[0.01, torch.float32]  # the documents warn of it


def test_a_method_needs_a_penalty():
    with advises(
        "objective.r1_r2_method=finite_difference: objective.r1 and objective.r2 are 0. Use objective.r1=1, or "
        "objective.r1_r2_method=exact"
    ):
        Adversarial(r1_r2_method="finite_difference").check()
    Adversarial(r1_r2_method="finite_difference", r1=1.0).check()
    Adversarial(r1_r2_method="exact").check()


def test_centering_penalises_the_sum_of_a_pair_of_logits():
    d = Critic()
    real, fake = batch(1), batch(2)
    loss = Adversarial("relativistic", center=0.5).discriminator(d, real, fake, 0)
    plain = Adversarial("relativistic").discriminator(d, real, fake, 0)
    expected = (d(real.images) + d(fake.images)).square().mean()
    torch.testing.assert_close(loss.parts["D/center"], expected.detach())
    torch.testing.assert_close(loss.total, plain.total + 0.5 * expected)
    assert centering_penalty(torch.tensor([3.0, -1.0]), torch.tensor([-3.0, 1.0])) == 0
