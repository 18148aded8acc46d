"""A clipped gradient is that of torch.nn.utils.clip_grad_norm_, and its norm is in the statistics."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import tiny_run
from advice import advises
from paragan.comm.exchange import NoExchange
from paragan.config.resolve import resolve
from paragan.game.gradient_clip import GradientClip, vector_norm
from paragan.game.player import Player
from paragan.optim.optimistic import extragradient, optimistic
from paragan.optim.optimizers import SGD, Adam, Lookahead, build_optimizer
from paragan.train.loop import play_round

WRAPPERS = {"plain": lambda optimizer: optimizer, "optimistic": optimistic, "extragradient": extragradient}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def loss(model, step):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    return model(x).square().sum()


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, fused=False), Lookahead(inner=Adam(lr=0.1, fused=False), k=3)])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_a_clipped_step_is_that_of_plain_torch(optimizer, wrapper, max_norm):
    plain, flat = net().double(), net().double()
    loss_of = lambda model, step: loss(lambda x: model(x.double()), step)  # noqa: E731
    reference = build_optimizer(optimizer, list(plain.parameters()), WRAPPERS[wrapper])
    player = Player(
        "P", flat, lambda parameters: build_optimizer(optimizer, parameters, WRAPPERS[wrapper]), max_norm=max_norm
    )
    norms = []
    for step in range(10):
        reference.zero_grad()
        loss_of(plain, step).backward()
        norms.append(clip_grad_norm_(plain.parameters(), max_norm))
        reference.step()
        with player.flat.exchanging(NoExchange(), step), player.requiring_grad():
            loss_of(flat, step).backward()
        player.step(step + 1, 1)
    total, steps = player.gradient_clip.pop_norms()
    assert steps == 10
    torch.testing.assert_close(total, torch.stack(norms).sum(), rtol=1e-12, atol=0)
    assert (max_norm < 1) == any(norm > max_norm for norm in norms)
    for p, q in zip(plain.parameters(), flat.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_a_smaller_gradient_is_not_changed_by_a_bit():
    grads = torch.randn(1000)
    before = grads.clone()
    GradientClip(grads, 100.0).clip()
    assert torch.equal(grads, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_norm_does_not_depend_on_the_number_of_threads(dtype):
    vector = torch.randn(1_000_003, dtype=torch.float64).to(dtype)
    threads = torch.get_num_threads()
    norms = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            norms.append(vector_norm(vector))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(norms[0], norms[1])
    assert torch.equal(norms[0], norms[2])
    torch.testing.assert_close(norms[0].double(), vector.double().norm(), rtol=1e-5, atol=0)


def mean_norms(*settings, world=None, rounds=4):
    s = tiny_run.make_session(tiny_run.make_run(*settings), world)
    for _ in range(rounds):
        play_round(s)
    line = s.stats.tick(s.clock.images, s.clock.step)
    return {name: value for name, value in line.items() if name.startswith("Optim/")}


CLIP = ("g.max_norm=0.3", "d.max_norm=0.3")


def test_statistics_have_the_mean_norm_of_clipped_gradients():
    assert mean_norms() == {}
    norms = mean_norms(*CLIP)
    assert norms.keys() == {"Optim/G/grad_norm", "Optim/D/grad_norm"}
    assert all(norm > 0.3 for norm in norms.values())  # before it is clipped
    assert mean_norms("d.max_norm=0.3").keys() == {"Optim/D/grad_norm"}


def test_accumulating_rounds_count_no_norm(pool):
    settings = (*CLIP, "strategy=sync", "strategy.sync_period=2", "strategy.sync_mode=accumulate")
    assert mean_norms(*settings, rounds=1) == {}
    one = mean_norms(*settings)
    several = pool(2, lambda world: mean_norms(*settings, world=world))
    assert several[0] == several[1]
    assert several[0] == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("strategy", ["gossip", "async"])
def test_ranks_with_gradients_of_their_own_share_the_mean_of_their_norms(strategy, pool):
    norms = pool(2, lambda world: mean_norms(*CLIP, f"strategy={strategy}", world=world))
    assert norms[0] == norms[1]
    assert norms[0].keys() == {"Optim/G/grad_norm", "Optim/D/grad_norm"}


@pytest.mark.parametrize("number", ["0", "-1"])
def test_a_norm_of_nothing_is_refused(number):
    with advises(f"g.max_norm={number}: must be positive. Use 1, or null to clip nothing"):
        tiny_run.make_run(f"g.max_norm={number}")
    tiny_run.make_run("g.max_norm=1")
    assert tiny_run.make_run("g.max_norm=null").g.max_norm is None


@pytest.mark.parametrize("strategy", ["DQGAN", "DPOSG"])
def test_steps_of_a_paper_are_not_clipped(strategy):
    data = tiny_run.make_dataset()
    with advises(
        "d.max_norm=1: strategy.paper_update=true takes steps of its own. Use --d.max_norm=null, or "
        "--strategy.paper_update=false."
    ):
        resolve(tiny_run.make_run(f"strategy={strategy}", "d.max_norm=1"), data)
    resolve(tiny_run.make_run(f"strategy={strategy}", "d.max_norm=null"), data)
    resolve(tiny_run.make_run(f"strategy={strategy}", "d.max_norm=1", "strategy.paper_update=false"), data)
