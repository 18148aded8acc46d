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
from tiny_estimator import Discriminator, Generator, PlainD, PlainG, config, make_manager, make_seeded, untyped


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


@pytest.mark.slow(after=2)
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


class ConvD(PlainD):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x, y):
        return super().forward(self.conv(x).mean(1), y)


def parameters_of(network) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in network.parameters()])


def train_rounds(scale_mgr: pg.ScalingManager, gan: pg.Estimator, rounds: int) -> None:
    for _ in range(rounds):
        scale_mgr.train(gan)


@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "not closed"])
@pytest.mark.parametrize("make_again", [False, True], ids=["same Estimator", "new Estimator"])
def test_another_manager_trains_networks_on_from_their_weights(is_closed, make_again):
    """As copies of them with these weights are trained, whatever the first manager had done to them."""
    g, d = make_seeded(PlainG), make_seeded(ConvD)
    gan = pg.Estimator(g, d)
    lecam = pg.Adversarial(lecam=0.1, r1=0.1)
    first = make_manager(objective=lecam, strategy=untyped("quantized"), device=pg.DeviceOptions(pad_channels=16))
    train_rounds(first, gan, 2)
    if is_closed:
        first.close()
    elif make_again:
        g.requires_grad_(True)
        d.requires_grad_(True)
    expected = PlainG(), ConvD()
    for network, trained in zip(expected, (g, d)):
        network.load_state_dict(trained.state_dict())
    if make_again:
        gan = pg.Estimator(g, d)
    for manager_gan in (gan, pg.Estimator(*expected)):
        with pg.ScalingManager(config(latent=8, d_steps=2), bs=16, num_workers=2) as scale_mgr:
            train_rounds(scale_mgr, manager_gan, 3)
    for network, trained in zip(expected, (g, d)):
        assert torch.equal(parameters_of(network), parameters_of(trained))
        for layer, trained_layer in zip(network.modules(), trained.modules(), strict=True):
            assert vars(layer).keys() == vars(trained_layer).keys()
        assert all(p.requires_grad for p in trained.parameters())


def test_frozen_parameters_stay_so_in_the_hands_of_every_manager():
    g = make_seeded(Generator)
    g.layers[0].requires_grad_(False)
    gan = pg.Estimator(g, Discriminator())
    before = [parameters_of(layer) for layer in g.layers]
    for _ in range(2):
        with make_manager() as scale_mgr:
            train_rounds(scale_mgr, gan, 2)
    assert torch.equal(parameters_of(g.layers[0]), before[0])
    assert not torch.equal(parameters_of(g.layers[1]), before[1])
    assert [p.requires_grad for layer in g.layers for p in layer.parameters()] == [False, False, True, True]


def test_a_manager_whose_networks_another_one_trains_is_refused():
    gan = pg.Estimator(PlainG(), PlainD())
    first, later = make_manager(), make_manager()
    train_rounds(first, gan, 1)
    train_rounds(later, gan, 1)
    for use in (lambda: first.train(gan), lambda: first.eval("fd")):
        with advises("such as a later ScalingManager or `to`. Use the later one, or a new one"):
            use()
    train_rounds(later, gan, 1)
    with make_manager() as new:
        train_rounds(new, gan, 1)


def test_a_closed_manager_is_refused_and_a_new_one_trains():
    gan = pg.Estimator(PlainG(), PlainD())
    with make_manager() as scale_mgr:
        train_rounds(scale_mgr, gan, 1)
    assert scale_mgr.eval("fd").value > 0
    with advises("ScalingManager: is closed. Make a new one"):
        scale_mgr.train(gan)
    with make_manager() as scale_mgr:
        train_rounds(scale_mgr, gan, 1)


@pytest.mark.parametrize("advice", ["close", "requires_grad_"])
def test_networks_in_the_hands_of_a_manager_are_no_new_estimator_before_they_are_released(advice):
    g, d = PlainG(), PlainD()
    scale_mgr = make_manager()
    train_rounds(scale_mgr, pg.Estimator(g, d), 1)
    with advises(
        "generator: none of its parameters requires a gradient. Call close of the ScalingManager that trains it, or "
        "requires_grad_(True) of its layers"
    ):
        pg.Estimator(g, d)
    if advice == "close":
        scale_mgr.close()
    else:
        g.requires_grad_(True)
        d.requires_grad_(True)
    with make_manager() as other:
        train_rounds(other, pg.Estimator(g, d), 1)
