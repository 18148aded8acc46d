"""What a run costs, foreseen: against what it really takes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tiny_run
from advice import Case, change
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.config.run import with_lanes
from paragan.core.devices import BACKENDS
from paragan.plan.cost import count_forward_flops, count_round_flops
from paragan.plan.memory import ResourceCounterMode, estimate
from paragan.plan.round_cost import (
    blank_dataset,
    build_roles,
    build_tested_networks,
    estimate_round,
    play_one_round,
)
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import build_session
from processes import run_cli

VARIANTS = {
    "plain": (),
    "r1": ("objective.r1=1", "objective.loss=nonsaturating"),
    "gp": ("objective.gp=10", "objective.loss=wasserstein", "d_steps=2", "nets.batch_norm=false"),
    "sgd": ("g.optimizer=sgd", "d.optimizer=sgd"),
    "lane by lane": ("device.lanes_per_pass=1",),
    "async": ("strategy=async", "strategy.split=none", "strategy.critic_lags=[0,2]"),
    "bf16": ("device.precision=bf16",),
}


def test_a_footprint_is_what_is_alive_at_one_time():
    with ResourceCounterMode() as counted:
        a = torch.zeros(1000)
        b = a.view(10, 100)[2:]  # shares a's memory
        c = b * 2
        del c
        d = torch.zeros(100)
    assert counted.peak_bytes == 4000 + 3200
    assert counted.live_bytes == 4000 + 400
    del a, b, d


def test_dry_run_computes_no_values():
    def play():
        big = torch.zeros(1 << 20, 1 << 20)
        return big @ big

    estimated = estimate(play)
    assert estimated.peak_bytes == 2 * 4 << 40
    assert estimated.flops == 2.0 * (1 << 60)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("kind", [torch.nn.Conv2d, torch.nn.ConvTranspose2d])
def test_a_gradient_of_a_convolution_takes_twice_its_operations_whatever_its_groups(kind, groups):
    layer = kind(8, 8, 3, 2, groups=groups)
    x = torch.ones(2, 8, 9, 9, requires_grad=True)
    with ResourceCounterMode() as counted:
        y = layer(x)
        forward = counted.flops
        y.sum().backward()
    assert counted.flops == 3 * forward > 0


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_memory_and_operations_are_those_of_a_round_that_is_played(settings):
    run = resolve(tiny_run.make_run("nets.width=16", "nets.batch_norm=true", *settings), tiny_run.make_dataset())
    estimated = estimate(lambda: play_one_round(run, blank_dataset(tiny_run.make_dataset())))
    with ResourceCounterMode() as counted:
        session = play_one_round(run, blank_dataset(tiny_run.make_dataset()))
    assert session.clock.step == 1
    assert estimated.peak_bytes == pytest.approx(counted.peak_bytes, rel=0.02)
    if settings == ():
        s = build_session(
            run,
            World.solo(),
            tiny_run.make_dataset(),
            build_networks(run, make_spec(run.data, tiny_run.make_dataset()), torch.device("cpu")),
        )
        play_round(s)
        counted = count_round_flops(*count_forward_flops(s.game), run.batch, 1)
        assert estimated.flops == pytest.approx(counted, rel=0.05)


def test_memory_is_that_of_a_round_which_others_came_before():
    """In the first round of Adam its moments are allocated when the tensors of backward are free again."""
    run = resolve(tiny_run.make_run("nets.width=64", "batch=8"), tiny_run.make_dataset())
    blank = blank_dataset(tiny_run.make_dataset())
    with ResourceCounterMode() as counted:
        session = build_session(run, World.solo(), blank, build_tested_networks(run, blank, World.solo()))
        play_round(session)
        first_peak = counted.peak_bytes
        play_round(session)
    assert counted.peak_bytes > 1.05 * first_peak
    assert estimate_round(run, blank).peak_bytes == pytest.approx(counted.peak_bytes, rel=0.02)


def test_the_copy_that_survives_lost_ranks_counts():
    run = resolve(tiny_run.make_run("nets.width=64", "strategy.peer_timeout_s=10"), tiny_run.make_dataset())
    blank = blank_dataset(tiny_run.make_dataset())
    alone, among_four = (estimate_round(run, blank, ranks).peak_bytes for ranks in (1, 4))
    g, d = (player.flat.params.nbytes for player in build_roles(run, blank, 1)[0].players)
    assert among_four - alone == pytest.approx(4 * g + 3 * d, rel=0.01)  # parameters, two moments, the average of G


@pytest.mark.slow(after=1)
@pytest.mark.parametrize(("lanes", "merge"), [(8, 1), (11, 2), (16, 3), (16, 0)])
@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_many_passes_are_estimated_from_a_few(settings, lanes, merge):
    run = resolve(
        with_lanes(tiny_run.make_run(f"device.lanes_per_pass={merge}", *settings), lanes), tiny_run.make_dataset()
    )
    assert estimate_round(run, blank_dataset(tiny_run.make_dataset())) == estimate(
        lambda: play_one_round(run, blank_dataset(tiny_run.make_dataset()))
    )


@pytest.mark.slow
def test_too_much_memory_is_reported(monkeypatch):
    arguments = ["train", "digits", "-n", "--nets.width=8", "--batch=64", "--lanes=4", "--device.kind=cpu"]
    assert "memory here" not in run_cli(*arguments).out
    monkeypatch.setattr(type(BACKENDS["cpu"]), "memory_bytes", lambda self, device: 820_000)
    case = Case(
        "",
        "that is more than the 820 kB of memory here. Use --batch=20, or --device.lanes_per_pass=1",
        ("--batch=20", "--device.lanes_per_pass=1"),
    )
    assert case.advice in run_cli(*arguments).out
    for follow in case.follow:
        assert "memory here" not in run_cli(*change(arguments, follow)).out
    monkeypatch.setattr(type(BACKENDS["cpu"]), "memory_bytes", lambda self, device: 10**5)
    assert run_cli(*arguments, "--device.lanes_per_pass=1").out.endswith("or smaller networks\n")
    assert run_cli(*arguments[:4], "--device.kind=cuda").status == 2


def test_a_rank_computes_only_its_lanes():
    run = dataclasses.replace(tiny_run.make_run("g_batch=32"), lanes=8)
    part = with_lanes(run, 3)
    assert (part.batch, part.g_batch, part.lanes) == (6, 12, 3)
    less, all_of_it = (
        estimate(lambda of=of: play_one_round(of, blank_dataset(tiny_run.make_dataset()))) for of in (part, run)
    )
    assert less.peak_bytes < all_of_it.peak_bytes
