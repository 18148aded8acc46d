"""The default recipe itself: any number of ranks gives the same model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import tiny_run
from paragan.config.resolve import make_spec
from paragan.data.dataset import load_data
from paragan.models.bn_recalibration import recalibrated_bn
from paragan.models.sampler import LatentSource
from paragan.recipes import get_recipe
from paragan.train.build import Networks, build_networks
from paragan.train.loop import play_round
from paragan.train.session import build_session


def two_kimg(world):
    """Return the tensors of model.safetensors after 2 kimg of `paragan train digits`."""
    run = dataclasses.replace(get_recipe("digits"), kimg=2.0)
    images = load_data("digits", resolution=8)
    s = build_session(run, world, images, build_networks(run, make_spec(run.data, images), world.device))
    while not s.clock.is_done:
        play_round(s)
    with recalibrated_bn(s.game.g, LatentSource(s.game.latent), s.game.labels, run.seed) as g:
        return {name: value.clone() for name, value in g.state_dict().items()}


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_n_ranks_equal_one(pool, ranks):
    """Equal up to rounding, which Adam's first steps amplify: they have the full learning rate, for any gradient."""
    one = two_kimg(tiny_run.World.solo())
    for several in pool(ranks, two_kimg):
        assert tiny_run.relative_distance(several, one, "") < 5e-3
        assert all(torch.equal(several[n], v) for n, v in one.items() if not v.is_floating_point())


class Double(nn.Module):
    """A network computed in float64, where rounding is negligible."""

    def __init__(self, net):
        super().__init__()
        self.net = net.double()

    def forward(self, x, y):
        return self.net(x.double(), y)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_in_float64_n_ranks_equal_one(pool, ranks):
    """With 2 kimg in float64, to show that the differences in float32 are rounding."""

    def job(world):
        run = dataclasses.replace(get_recipe("digits"), kimg=2.0)
        images = load_data("digits", resolution=8)
        pair = build_networks(run, make_spec(run.data, images), world.device)
        s = build_session(run, world, images, Networks(Double(pair.g), Double(pair.d), pair.latent))
        while not s.clock.is_done:
            play_round(s)
        return {
            name: value for name, value in tiny_run.session_state(s).items() if "running" not in name
        }  # float32 moments

    one = job(tiny_run.World.solo())
    for several in pool(ranks, job):
        for network in ("G/", "D/"):
            assert tiny_run.relative_distance(several, one, network) < 1e-9
