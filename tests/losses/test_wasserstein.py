"""The Wasserstein critic measures how far apart two distributions are, and a step of G brings them nearer.

Two normal distributions of one covariance whose means are m apart: moving all of one by m makes it the other, and no
plan moves less, so W1 = m. The critics are smooth: clipped to 0.01 they are then all but straight, where one
with kinks is steeper in some places than in others, and its gap falls short of m times its largest slope.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paragan.comm.exchange import NoExchange
from paragan.comm.world import World
from paragan.core.rng import LaneRng
from paragan.core.types import Batch
from paragan.game.player import Player
from paragan.game.turn import Turn, play_turns
from paragan.losses.adversarial import Adversarial
from paragan.optim.optimizers import SGD, Adam

DIRECTION = torch.tensor([0.6, -0.8])  # of length 1
LAMBDA = 10.0
PENALISED, CLIPPED = Adversarial("wasserstein", gp=LAMBDA), Adversarial("wasserstein", clip=0.01)
both = pytest.mark.parametrize("objective", [PENALISED, CLIPPED], ids=["penalised", "clipped"])


def cloud(at: float, step: int, stream: str, n: int = 256) -> Batch:
    """Draw points [n, 2] around at * DIRECTION."""
    draw = LaneRng(seed=0, position=step, lanes=(0,), per_lane=n)
    return Batch(draw.normal(stream, 2) * 0.5 + at * DIRECTION, None, draw)


def step_of(player: Player, loss, reals: Batch, step: int) -> None:
    play_turns(
        (Turn(player, loss, NoExchange(), World.solo().all_ranks),), [reals], step, total_images=step, new_images=1
    )


def critic(objective: Adversarial, real: float, fake: float, steps: int = 300) -> nn.Module:
    """Train a critic [n, 2] -> [n] to separate points around `real` from those around `fake`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 32), nn.Softplus(), nn.Linear(32, 1))
    optimizer = Adam(lr=1e-2, betas=(0.5, 0.9))
    d = Player("D", net, optimizer.build, lr_factor=lambda step: 1 - step / steps, weight_clip=objective.clip or None)
    for step in range(steps):
        loss = lambda reals, step: objective.discriminator(  # noqa: E731
            lambda x, y: net(x).squeeze(1), reals, cloud(fake, step, "fake"), step
        )
        step_of(d, loss, cloud(real, step, "real"), step)
    return net


@torch.no_grad()
def gap(net: nn.Module, real: float, fake: float) -> float:
    """Return mean D(real) - mean D(fake) on held-out points."""
    means = [net(cloud(at, 1 << 20, stream, 50_000).images).mean() for at, stream in ((real, "real"), (fake, "fake"))]
    return float(means[0] - means[1])


def steepest(net: nn.Module, real: float, fake: float) -> float:
    """Return the largest gradient norm of D between the two."""
    x = torch.cat([cloud(at, 1 << 20, "slope", 5000).images for at in (real, (real + fake) / 2, fake)])
    x.requires_grad_(True)
    (slope,) = torch.autograd.grad(net(x).sum(), x)
    return float(slope.norm(dim=1).max())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("real", "fake"), [(1.0, 0.0), (0.0, 1.0), (2.0, 0.0)])
def test_penalised_critic_measures_the_distance(real, fake):
    """A linear critic of slope K pays lambda (K - 1)^2 and gains K m: K = 1 + m / (2 lambda)."""
    net = critic(PENALISED, real, fake)
    m = abs(real - fake)
    assert gap(net, real, fake) == pytest.approx(m * (1 + m / (2 * LAMBDA)), rel=0.02)


def test_clipped_critic_measures_a_multiple_of_the_distance():
    gaps = []
    for real, fake in ((1.0, 0.0), (0.0, 1.0), (2.0, 0.0)):
        net = critic(CLIPPED, real, fake)
        m = abs(real - fake)
        gaps.append(gap(net, real, fake))
        assert gaps[-1] / steepest(net, real, fake) == pytest.approx(m, rel=0.03)
        assert all(p.abs().max() <= CLIPPED.clip for p in net.parameters())
    assert gaps == pytest.approx([gaps[0], gaps[0], 2 * gaps[0]], rel=0.03)


@pytest.mark.slow(after=2)
@both
@pytest.mark.parametrize(("real", "fake"), [(1.0, 0.0), (0.0, 1.0)])
def test_step_of_g_moves_fakes_towards_the_reals(objective, real, fake):
    """G only shifts its points. Gradient descent with learning rate r moves them by r times the critic's slope."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(fake * DIRECTION)

        def forward(self, x):
            return x + self.by

    net = critic(objective, real, fake)
    g = Shifted()
    rate = 0.1 / steepest(net, real, fake)
    shift = Player("G", g, SGD(lr=rate).build)
    critical = lambda x, y: net(x).squeeze(1)  # noqa: E731

    def loss(reals, step):
        fakes = Batch(g(cloud(0.0, step, "fake").images), None, reals.rng)
        return objective.generator(critical, fakes, reals, step)

    before = torch.dist(g.by, real * DIRECTION)
    step_of(shift, loss, cloud(real, 0, "real"), 0)
    after = torch.dist(g.by, real * DIRECTION)
    assert float(before - after) == pytest.approx(0.1, rel=0.1)
