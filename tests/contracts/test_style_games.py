"""StyleGAN2 keeps the contracts: noise and style mixing from the bits of latents, path length, standard deviations."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny_run
from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.train.build import build_networks
from paragan.train.loop import play_round

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

STYLES = (
    *("nets=stylegan2", "nets.channel_base=64", "nets.channel_max=8", "nets.latent=8", "nets.style=8"),
    *("nets.mapping_layers=2", "batch=32", "objective.loss=nonsaturating", "objective.path_length=2"),
    *("objective.path_length_every=2", "objective.r1=1", "objective.r1_every=2"),
)


def make_run(strategy: str, *more: str):
    return tiny_run.make_run(*STYLES, *table.STRATEGIES[strategy], *more)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("strategy", ["sync", "CPOAdam", "async", "async teams"])
def test_n_ranks_equal_one(pool, strategy):
    run = make_run(strategy)
    one = tiny_run.play_rounds(run, 6)
    other = pool(3, lambda world: tiny_run.play_rounds(run, 6, world))[0]
    for prefix in ("G/", "D/"):
        assert tiny_run.relative_distance(other, one, prefix) < 2e-4
    assert other["G/mapping.average.mean"].any()
    assert other["G/objective_state.mean"] > 0


@pytest.mark.slow
def test_lane_by_lane_equals_all_lanes():
    one, other = (tiny_run.play_rounds(make_run("sync", *more), 6) for more in ((), ("device.lanes_per_pass=1",)))
    for prefix in ("G/", "D/"):
        assert tiny_run.relative_distance(other, one, prefix) < 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync int4", "quantized", "gossip", "sync every 2", "async, lags and replay"])
def test_six_and_four_rounds_equal_ten(pool, strategy, tmp_path):
    run = make_run(strategy)
    assert all(pool(2, lambda world: tiny_run.resumes_bit_for_bit(run, world, tmp_path, 6, 4)))


def test_rounds_equal_a_plain_loop():
    """StyleGAN2's step in plain PyTorch: lazy R1, lazy path length with the mean of the steps before."""
    run = make_run("sync", "nets.style_mixing=0")
    s = tiny_run.make_session(run)
    nets = build_networks(run, make_spec(run.data, tiny_run.make_dataset()), World.solo().device)
    g, d = nets.g, nets.d
    d.stddev.lane_batch = 4
    opt = {net: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.9)) for net in (g, d)}
    mean = torch.zeros(())
    for step in range(5):
        play_round(s)
        batch = s.lanes.micro_batches[0]
        due = step % 2 == 0
        real, fake = batch.images.clone().requires_grad_(due), s.game.generator_inputs(batch, "D")
        with torch.no_grad():
            fakes = g(*fake)
        on_real = d(real, batch.labels)
        loss = F.softplus(d(fakes, fake[1])).mean() + F.softplus(-on_real).mean()
        if due:
            (slope,) = torch.autograd.grad(on_real.sum(), real, create_graph=True)
            loss = loss + 2 * slope.square().sum((1, 2, 3)).mean() / 2
        opt[d].zero_grad(), loss.backward(), opt[d].step()
        z, y = s.game.generator_inputs(batch, "G")
        g.mapping.average.sum.zero_(), g.mapping.average.count.zero_()
        loss = F.softplus(-d(g(z, y), y)).mean()
        if due:
            half = torch.arange(32).view(8, 4)[:, :2].flatten()
            w = g.mapping(z[half], y[half])[:, None].expand(-1, g.num_styles, -1)
            images = g.synthesis(w)
            noise = batch.rng.normal("path length", *images.shape[1:])[half] / 8
            (slope,) = torch.autograd.grad((images * noise).sum(), w, create_graph=True)
            lengths = slope.square().sum(2).mean(1).sqrt()
            loss = loss + 2 * 2 * (lengths - mean).square().mean()
            mean = 0.99 * mean + 0.01 * lengths.mean().detach()
        opt[g].zero_grad(), loss.backward(), opt[g].step()
        g.mapping.average.apply_synchronised()
    trained = tiny_run.session_state(s)
    mine = {f"G/{k}": v for k, v in g.state_dict().items()} | {f"D/{k}": v for k, v in d.state_dict().items()}
    mine |= {"G/objective_state.mean": mean}
    trained.pop("G/average")
    for prefix in ("G/mapping.layers", "G/mapping.average.mean", "G/synthesis", "G/objective_state", "D/"):
        assert tiny_run.relative_distance(mine, trained, prefix) < 1e-4
