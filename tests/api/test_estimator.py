"""The networks that an `Estimator` accepts, and those it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paragan as pg
from advice import advises
from paragan.api.estimator import EstimatorNets
from tiny_estimator import Discriminator, Generator, PlainD, PlainG, config, make_manager


def test_plain_modules_with_batch_norm():
    with pg.ScalingManager(config(latent=8), bs=32, num_workers=4) as scale_mgr:
        g, d = PlainG(), PlainD()
        gan = pg.Estimator(g, d)
        for _ in range(3):
            scale_mgr.train(gan)
        assert g.norm.num_batches_tracked == 3


def test_loose_parameters_and_nested_layers_are_trained():
    class Loose(Generator):
        def __init__(self):
            self.blocks = {"all": [nn.Linear(18, 64)]}
            self.scale, self.type = nn.Parameter(torch.ones(64)), nn.Identity()

        def model_fn(self, latent_var, y):
            h = torch.cat([latent_var, nn.functional.one_hot(y, 10).float()], 1)
            return (self.blocks["all"][0](h) * self.scale).tanh().view(-1, 1, 8, 8)

    with make_manager() as scale_mgr:
        g = Loose()
        gan = pg.Estimator(g, Discriminator())
        before = g.blocks["all"][0].weight.clone()
        for _ in range(3):
            scale_mgr.train(gan)
        assert (g.scale != 1).any()
        assert not torch.equal(g.blocks["all"][0].weight, before)


def test_only_images_have_a_channels_last_layout():
    class Volume(PlainD):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(1, 1, 1)

        def forward(self, x, y):
            return super().forward(self.conv(x[:, :, None]), y)

    with make_manager() as scale_mgr:
        assert scale_mgr.train(pg.Estimator(PlainG(), Volume()))["Progress/step"] == 1


class WrongG(PlainG):
    def forward(self, z, y):
        return super().forward(z, y).flatten(1)


class WrongD(PlainD):
    def forward(self, x, y):
        return super().forward(x, y).mean()


class WithNorm(PlainG):
    def __init__(self, **arguments: Any):
        super().__init__()
        self.norm = nn.BatchNorm2d(1, **arguments)


class WithLayer(PlainD):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer


SHARED = nn.Linear(8, 64)


class WithSharedLayer(PlainG):
    def __init__(self):
        super().__init__()
        self.net = SHARED


REFUSED_NETS = {  # name -> G and D, the advice, G and D as advised
    "shape of images": (
        (WrongG, PlainD),
        advises("generator: returned [8, 64] for 8 latents. Return [8, 1, 8, 8]"),
        (PlainG, PlainD),
    ),
    "one logit": (
        (PlainG, WrongD),
        advises("discriminator: returned [] for 8 images. Return logits of [8]"),
        (PlainG, PlainD),
    ),
    "no statistics": (
        (lambda: WithNorm(track_running_stats=False), PlainD),
        advises("Use track_running_stats=True"),
        (lambda: WithNorm(track_running_stats=True), PlainD),
    ),
    "shared layer": (
        (WithSharedLayer, lambda: WithLayer(SHARED)),
        advises("Copy the shared layers"),
        (WithSharedLayer, lambda: WithLayer(copy.deepcopy(SHARED))),
    ),
}


@pytest.mark.parametrize("case", REFUSED_NETS)
def test_networks_that_are_refused_are_trained_as_advised(case):
    refused, refusal, advised = REFUSED_NETS[case]
    with make_manager() as scale_mgr:
        with refusal:
            scale_mgr.train(make_estimator(*refused))
        assert scale_mgr.train(make_estimator(*advised))["Progress/step"] == 1


def make_estimator(make_g: Callable[[], nn.Module], make_d: Callable[[], nn.Module]) -> pg.Estimator:
    return pg.Estimator(make_g(), make_d())


def test_cached_measurements_are_of_these_networks_and_their_code():
    class OtherG(PlainG):
        def __init__(self):
            super().__init__()
            self.more = nn.Linear(8, 8)

    first, other = (EstimatorNets.of(pg.Estimator(make(), PlainD()), 8) for make in (PlainG, OtherG))
    assert first.structure != other.structure
    assert first.structure == EstimatorNets.of(pg.Estimator(PlainG(), PlainD()), 8).structure


@pytest.mark.parametrize("dtype", [torch.int16, torch.bool, torch.float16, torch.float64])
def test_buffers_of_any_dtype_come_from_rank_0(pool, dtype):
    def job(world):
        scale_mgr = pg.ScalingManager(config(), 32, 4)
        scale_mgr.world = world
        g = Generator()
        layer = g.layers[0]
        layer.register_buffer("table", (torch.arange(6).view(2, 3) + 7 * world.rank).to(dtype))
        layer.register_buffer("number", torch.tensor(world.rank - 1).to(dtype))
        scale_mgr.train(pg.Estimator(g, Discriminator()))
        return layer.table, layer.number

    for table, number in pool(2, job):
        assert torch.equal(table, torch.arange(6).view(2, 3).to(dtype))
        assert torch.equal(number, torch.tensor(-1).to(dtype))
