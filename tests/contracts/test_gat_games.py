"""GAT keeps the contracts: images of several levels with noise, relativistic loss, finite differences."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import tiny_run
from advice import advises
from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.validate import validate
from paragan.losses.noise_levels import add_noise_by_level
from paragan.train.build import build_networks
from paragan.train.loop import play_round

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

GAT = (
    *("nets=gat", "nets.width=16", "nets.depth=4", "nets.heads=2", "nets.stages=2", "nets.latent=8"),
    *("batch=32", "objective.loss=relativistic", "objective.noise_levels=2"),
    *("objective.r1=1", "objective.r2=1", "objective.r1_r2_method=finite_difference"),
    *("objective.difference_sigma=0.3", "g.optimizer.eps=1e-3", "d.optimizer.eps=1e-3"),  # small ones amplify rounding
)


def make_run(strategy: str, *more: str):
    return tiny_run.make_run(*GAT, *table.STRATEGIES[strategy], *more)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("strategy", ["sync", "CPOAdam", "async", "async teams"])
def test_n_ranks_equal_one(pool, strategy):
    run = make_run(strategy, "objective.augment=diffaugment")
    one = tiny_run.play_rounds(run, 6)
    other = pool(3, lambda world: tiny_run.play_rounds(run, 6, world))[0]
    for prefix in ("G/", "D/"):
        assert tiny_run.relative_distance(other, one, prefix) < 2e-4
    assert other["G/mapping.average.mean"].any()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sync int4", "quantized", "gossip", "sync every 2", "async, lags and replay"])
def test_six_and_four_rounds_equal_ten(pool, strategy, tmp_path):
    run = make_run(strategy)
    assert all(pool(2, lambda world: tiny_run.resumes_bit_for_bit(run, world, tmp_path, 6, 4)))


def test_rounds_equal_a_plain_loop():
    """GAT's step in plain PyTorch, but for the noise, which comes from the lanes."""
    run = make_run("sync")
    s = tiny_run.make_session(run)
    nets = build_networks(run, make_spec(run.data, tiny_run.make_dataset()), World.solo().device)
    g, d = nets.g, nets.d
    opt = {net: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-3) for net in (g, d)}
    for _ in range(4):
        play_round(s)
        batch = s.lanes.micro_batches[0]
        reals = batch.images[:, None].expand(-1, 2, -1, -1, -1)

        def noisy(x, stream, rng=batch.rng):
            return add_noise_by_level(x, 0.125, rng, f"levels/{stream}")

        def slope(x, y, logits, side, rng=batch.rng):
            noise = rng.normal(f"finite difference/{side}", *x.shape[1:])
            return ((d(x + 0.3 * noise, y) - logits) / 0.3).square().mean()

        z, y = s.game.generator_inputs(batch, "D")
        with torch.no_grad():
            fake = noisy(g(z, y).levels, "D/fake")
        real = noisy(reals, "D/real")
        on_real, on_fake = d(real, batch.labels), d(fake, y)
        loss = F.softplus(on_fake - on_real).mean()
        loss = loss + (slope(real, batch.labels, on_real, "real") + slope(fake, y, on_fake, "fake")) / 2
        opt[d].zero_grad(), loss.backward(), opt[d].step()
        z, y = s.game.generator_inputs(batch, "G")
        g.mapping.average.sum.zero_(), g.mapping.average.count.zero_()
        on_fake = d(noisy(g(z, y).levels, "G/fake"), y)
        loss = F.softplus(d(noisy(reals, "G/real"), batch.labels).detach() - on_fake).mean()
        opt[g].zero_grad(), loss.backward(), opt[g].step()
        g.mapping.average.apply_synchronised()
    trained = tiny_run.session_state(s)
    mine = {f"G/{k}": v for k, v in g.state_dict().items()} | {f"D/{k}": v for k, v in d.state_dict().items()}
    for prefix in ("G/mapping", "G/blocks", "G/images", "D/blocks", "D/patches", "D/head"):
        assert tiny_run.relative_distance(mine, trained, prefix) < 1e-4


def test_levels_of_networks_and_objective_must_agree():
    with advises("Use objective.noise_levels=2"):
        validate(make_run("sync", "objective.noise_levels=1"), 1)
    with advises("Use objective.noise_levels=1"):
        validate(tiny_run.make_run("objective.noise_levels=4"), 1)
    with advises("Use objective.zcr=0 and objective.zcr_g=0"):
        validate(make_run("sync", "objective.zcr=1"), 1)


def test_bf16_trains_without_warnings():
    state = tiny_run.play_rounds(make_run("sync", "device.precision=bf16"), 2)
    assert all(value.isfinite().all() for value in state.values() if value.is_floating_point())
