"""Optimizers on the flat vector equal those on the network's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paragan.comm.exchange import NoExchange
from paragan.game.ema import EMA, EMAConfig
from paragan.game.player import Player
from paragan.optim.optimizers import SGD, Adam, RMSprop, scale_lr, warm_up_factor

CASES = {
    "adam": Adam(lr=0.1, fused=False),
    "adam fused": Adam(lr=0.1),
    "adamw": Adam(lr=0.1, weight_decay=0.1, fused=False),
    "sgd": SGD(lr=0.1, momentum=0.9, fused=False),
    "sgd fused": SGD(lr=0.1),
    "rmsprop": RMSprop(lr=0.01),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(model, step):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    return model(x).square().sum()


@pytest.mark.parametrize("optimizer", CASES.values(), ids=CASES)
def test_flat_vector_steps_equal_parameter_steps(optimizer):
    plain, flat = net(), net()
    reference = optimizer.build(list(plain.parameters()))
    player = Player("P", flat, optimizer.build)
    for step in range(10):
        reference.zero_grad()
        loss(plain, step).backward()
        reference.step()
        with player.flat.exchanging(NoExchange(), step), player.requiring_grad():
            loss(flat, step).backward()
        player.step(step + 1, 1)
    for p, q in zip(plain.parameters(), flat.parameters(), strict=True):
        if getattr(optimizer, "fused", False):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        else:
            assert torch.equal(p, q)


def test_layer_wise_optimizers_get_the_parameters():
    received = []
    Player("P", net(), lambda ps: received.append(ps) or torch.optim.SGD(ps, lr=1), elementwise=False)
    assert [p.dim() for p in received[0]] == [1, 2, 1, 2]


def test_warm_up_is_linear_and_the_live_rate():
    player = Player("P", net(), SGD(lr=0.5).build, lr_factor=warm_up_factor(0.1))
    for images, expected in ((25, 0.125), (50, 0.25), (100, 0.5), (900, 0.5)):
        player.prepare_step(images)
        assert player.learning_rate == pytest.approx(expected)


def test_lr_scaling_rules():
    assert scale_lr(1e-3, "linear", 256, 64) == pytest.approx(4e-3)
    assert scale_lr(1e-3, "sqrt", 256, 64) == pytest.approx(2e-3)
    assert scale_lr(1e-3, "none", 256, 64) == 1e-3


def test_ema_halves_its_distance_every_half_life():
    average = EMA(torch.zeros(1))
    config = EMAConfig(half_life_kimg=1.0, rampup=0.0)
    for i in range(100):
        average.update(torch.ones(1), config.decay(10 * (i + 1), 10))
    assert average.params.item() == pytest.approx(0.5, abs=1e-6)


def test_ema_rampup_shortens_the_half_life():
    assert EMAConfig(10, rampup=0.05).decay(1000, 50) == pytest.approx(0.5)
    assert EMAConfig(10, rampup=0.0).decay(1000, 10_000) == pytest.approx(0.5)


def test_requires_grad_is_reset_after_an_error():
    player = Player("P", net(), SGD().build)

    def turn_that_fails():
        with player.requiring_grad():
            assert all(p.requires_grad for p in player.net.parameters())
            return 1 / 0

    with pytest.raises(ZeroDivisionError):
        turn_that_fails()
    assert not any(p.requires_grad for p in player.net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", [Adam(eps=1e-4), SGD(), SGD(momentum=0.9), RMSprop(eps=1e-4)])
def test_every_number_of_any_dtype_is_stepped(optimizer, dtype):
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer.build([parameter]).step()
    assert parameter.lt(0).all()
