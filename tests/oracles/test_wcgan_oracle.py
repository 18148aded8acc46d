"""W-CGAN of one label (Lupo Pasini & Yin 2022): WGAN with clipped weights (Arjovsky et al. 2017), or with a gradient
penalty (Gulrajani et al. 2017)."""

from __future__ import annotations

import pytest
import torch
from players import ADAM, RATE_D, RATE_G, Adam, JointGame, check, split
from torch import Tensor

RMSPROP = ("g.optimizer=rmsprop", "d.optimizer=rmsprop", "g.optimizer.lr=0.002", "d.optimizer.lr=0.003")
CLIP, PENALTY = 0.1, 10.0


class RMSProp:
    """v <- alpha v + (1 - alpha) g^2,  u = lr g / (sqrt(v) + eps); alpha and eps as in PyTorch."""

    def __init__(self, rate: float):
        self.rate, self.v = rate, 0.0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.v = 0.99 * self.v + 0.01 * gradient**2
        return self.rate * gradient / (self.v.sqrt() + 1e-8)


@pytest.mark.parametrize(
    ("ranks", "n_critic", "optimizer"),
    [(1, 5, "rmsprop"), (1, 1, "rmsprop"), (2, 2, "rmsprop"), (1, 5, "adam"), (3, 2, "adam")],
)
def test_clipped_critic(pool, ranks, n_critic, optimizer):
    """n_critic times: step of D, clip(D, -c, c); then G steps against that D."""
    fields = (f"d_steps={n_critic}", f"objective.clip={CLIP}", "data.only=3")
    settings = ("strategy=sync", *fields, *(RMSPROP if optimizer == "rmsprop" else ADAM))
    game, every = JointGame(settings, ranks), range(ranks)
    g, d = split(game.start)
    step_g, step_d = (RMSProp(0.002), RMSProp(0.003)) if optimizer == "rmsprop" else (Adam(RATE_G), Adam(RATE_D))
    for k in range(6):
        for t in range(k * n_critic, (k + 1) * n_critic):
            d = d - step_d(sum(game.d(g, d, i, t) for i in every) / ranks)
            d = d.clamp(-CLIP, CLIP)
        g = g - step_g(sum(game.g(g, d, i, t) for i in every) / ranks)
    check(pool, settings, 6, [torch.cat([g, d])] * ranks)


def penalty_gradient(game: JointGame, g: Tensor, d: Tensor, rank: int, step: int) -> Tensor:
    """Return the gradient in D of lambda E(|grad D(x)| - 1)^2 at x = e fake + (1 - e) real."""
    batch = game.batch(rank, step)
    e = batch.rng.uniform("gradient penalty", 1, 1, 1).double()
    x = e * game.fakes(g, rank, step, "D") + (1 - e) * batch.images.double()
    x, d = x.requires_grad_(True), d.clone().requires_grad_(True)
    slope = torch.autograd.grad(game._apply(game.networks.d, d, x).sum(), x, create_graph=True)[0]
    return torch.autograd.grad(PENALTY * (slope.flatten(1).norm(dim=1) - 1).square().mean(), d)[0]


@pytest.mark.parametrize(("ranks", "n_critic"), [(1, 5), (3, 2)])
def test_gradient_penalty(pool, ranks, n_critic):
    """The slope has the dtype of images, float32."""
    settings = ("strategy=sync", f"d_steps={n_critic}", f"objective.gp={PENALTY}", *ADAM)
    game, every = JointGame(settings, ranks), range(ranks)
    (g, d), step_g, step_d = split(game.start), Adam(RATE_G), Adam(RATE_D)
    for k in range(6):
        for t in range(k * n_critic, (k + 1) * n_critic):
            gradients = [game.d(g, d, i, t) + penalty_gradient(game, g, d, i, t) for i in every]
            d = d - step_d(sum(gradients) / ranks)
        g = g - step_g(sum(game.g(g, d, i, t) for i in every) / ranks)
    check(pool, settings, 6, [torch.cat([g, d])] * ranks, tolerance=1e-6)
