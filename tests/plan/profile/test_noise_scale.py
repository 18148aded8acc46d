"""The gradient noise scale: against problems whose own is known."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import tiny_run
from paragan.comm.world import World
from paragan.core.clock import Clock
from paragan.core.types import Loss
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.plan.profile.noise_scale import SquaredGradNorms, estimate_noise_scale, measure_grad_norms
from paragan.train.session import rebind_to_world


def samples(signal, covariance, lane, lanes, steps, seed=0):
    """Lengths of Gaussian gradients, as lanes of so many images have them."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        each = signal + rng.standard_normal((lanes, len(signal))) * np.sqrt(covariance / lane)
        yield SquaredGradNorms((each.mean(0) ** 2).sum(), (each**2).sum(1).mean())


def test_gaussian_gradients_have_the_generated_noise_scale():
    signal, covariance = np.full(50, 0.1), np.linspace(0.1, 2, 50)
    truth = covariance.sum() / (signal**2).sum()
    result = estimate_noise_scale([*samples(signal, covariance, 4, 8, 400)], 4, 32)
    assert result.images == pytest.approx(truth, rel=0.1)
    assert result.low < truth < result.high


def test_the_confidence_interval_has_its_stated_coverage():
    signal, covariance = np.full(20, 0.3), np.full(20, 1.0)
    truth = covariance.sum() / (signal**2).sum()
    result = [estimate_noise_scale([*samples(signal, covariance, 8, 4, 40, seed)], 8, 32) for seed in range(60)]
    assert sum(one.low <= truth <= one.high for one in result) >= 50


def test_gradients_without_noise_and_without_signal():
    assert estimate_noise_scale([SquaredGradNorms(2.0, 2.0)] * 5, 4, 32).images == 0
    assert estimate_noise_scale([SquaredGradNorms(0.125, 1.0)] * 5, 4, 32).images == math.inf
    assert estimate_noise_scale([SquaredGradNorms(math.nan, 1.0)], 4, 32) is None


class Point(nn.Module):
    """A network that is where it is."""

    def __init__(self):
        super().__init__()
        self.at = nn.Parameter(torch.full((64,), 0.2))

    def forward(self, x, y=None):
        return self.at.expand(len(x), 64)


class Quadratic:
    """Half the squared distance from each image: the gradient at a point is how far it is from their mean, and its
    covariance that of the images."""

    second_order = False
    uses_fakes = True
    latent_perturbation = 0.0

    def discriminator(self, d, real, fake, step):
        return Loss((d(real.images) - real.images.flatten(1)).square().sum(1).mean() / 2)

    def generator(self, d, fake, real, step):
        return Loss((fake.images - real.images.flatten(1)).square().sum(1).mean() / 2)

    def weight_penalty(self, player, net):
        return None


def player(name):
    return Player(name, Point(), lambda parameters: torch.optim.SGD(parameters, lr=1e-12))


def test_lane_gradients_estimate_the_per_image_covariance():
    images = tiny_run.make_dataset()
    game = Game(g=player("G"), d=player("D"), objective=Quadratic(), latent=1, g_lane_batch=10, d_lane_batch=10)
    run = tiny_run.make_run("batch=80", "lanes=8", "device.lanes_per_pass=1")
    session = rebind_to_world(run, World.solo(), images, game, Clock(1))
    rounds = [measure_grad_norms(session) for _ in range(60)]
    x = images.images.reshape(len(images.images), 64) / 127.5 - 1
    truth = x.var(0).sum() / ((x.mean(0) - 0.2) ** 2).sum()
    assert session.clock.images == 60 * 80
    for name in ("G", "D"):
        result = estimate_noise_scale([one for of_round in rounds for one in of_round[name]], 10, 80)
        assert result.images == pytest.approx(truth, rel=0.1)
    # epochs are drawn without replacement, so the total batch is a little less noisy than of independent images


def test_taking_the_noise_is_training():
    """The same steps as an ordinary round, lane by lane."""
    run = tiny_run.make_run("device.lanes_per_pass=1", "d_steps=2", "objective.r1=1")
    session = tiny_run.make_session(run)
    for _ in range(3):
        result = measure_grad_norms(session)
    assert [len(result[name]) for name in "GD"] == [1, 2]
    assert tiny_run.is_equal(tiny_run.gather_owner_state(session), tiny_run.play_rounds(dataclasses.replace(run), 3))
