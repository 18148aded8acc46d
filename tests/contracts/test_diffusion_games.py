"""A diffusion model and its distillation keep the contracts: one player, and two with a frozen teacher."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml

import tiny_pipelines
import tiny_run
from advice import advises
from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.validate import validate
from paragan.core.noise_map import with_noise_map
from paragan.losses.distribution_matching import matching_loss
from paragan.train.build import build_networks
from paragan.train.loop import play_round

spec = importlib.util.spec_from_file_location("table", Path(__file__).with_name("table.py"))
table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(table)

SMALL_NETS = ("nets=edm", "nets.widths=[8, 8]", "nets.blocks=1", "nets.latent=64", "batch=32")
GENTLE = ("g.optimizer.eps=1e-3", "d.optimizer.eps=1e-3")  # Adam amplifies the rounding of small gradients
DIFFUSION = (*SMALL_NETS, "nets.steps=2", "objective=denoising", *GENTLE)
DISTILL = (*SMALL_NETS, "nets.steps=1", "nets.critic=score", "objective=distribution_matching", *GENTLE)
UNET = yaml.safe_dump(tiny_pipelines.TINY_UNET, default_flow_style=True)
DISTILL_UNET = (
    *("nets=diffusers-unet", f"nets.unet={UNET}", "nets.steps=1", "nets.critic=score", "nets.latent=64"),
    *("nets.sigma_max=15", "batch=32", "objective=distribution_matching", *GENTLE),
)
WEIGHTS = ("objective.adversarial=0.3", "objective.d_adversarial=0.2")


def make_run(game, strategy: str, *more: str):
    return tiny_run.make_run(*game, *table.STRATEGIES[strategy], *more)


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("game", "strategy"),
    [
        (DIFFUSION, "sync"),
        (DIFFUSION, "CPOAdam"),
        (DISTILL, "sync"),
        (DISTILL, "async"),
        (DISTILL, "async teams"),
        (DISTILL_UNET, "sync"),
    ],
)
def test_n_ranks_equal_one(pool, game, strategy):
    run = make_run(game, strategy)
    one = tiny_run.play_rounds(run, 5)
    other = pool(3, lambda world: tiny_run.play_rounds(run, 5, world))[0]
    for prefix in ("G/", "D/") if game is not DIFFUSION else ("G/",):  # a D that never plays is 0
        assert tiny_run.relative_distance(other, one, prefix) < 2e-4


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(
    ("game", "strategy"),
    [
        (DIFFUSION, "gossip"),
        (DIFFUSION, "sync every 2"),
        (DISTILL, "sync int4"),
        (DISTILL, "gossip"),
        (DISTILL_UNET, "sync"),
    ],
)
def test_three_and_two_rounds_equal_five(pool, game, strategy, tmp_path):
    run = make_run(game, strategy)
    assert all(pool(2, lambda world: tiny_run.resumes_bit_for_bit(run, world, tmp_path, 3, 2)))


def networks_of(run):
    return build_networks(run, make_spec(run.data, tiny_run.make_dataset()), World.solo().device)


def assert_equal_networks(s, **nets):
    trained = tiny_run.session_state(s)
    for name, net in nets.items():
        mine = {f"{name}/{k}": v for k, v in net.state_dict().items()}
        assert tiny_run.relative_distance(mine, trained, f"{name}/") < 1e-4


def test_denoising_equals_a_plain_loop():
    run = make_run(DIFFUSION, "sync")
    s = tiny_run.make_session(run)
    g = networks_of(run).g
    opt = torch.optim.Adam(g.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-3)
    for _ in range(4):
        play_round(s)
        batch = s.lanes.micro_batches[0]
        sigma = (-1.2 + 1.2 * batch.rng.normal("sigma", 1)).exp().view(-1, 1, 1, 1)
        noisy = batch.images + sigma * batch.rng.normal("denoising", *batch.images.shape[1:])
        error = (g.denoise(noisy, sigma.flatten(), batch.labels) - batch.images).square()
        loss = ((sigma**2 + 0.25) / (sigma * 0.5) ** 2 * error).mean()
        opt.zero_grad(), loss.backward(), opt.step()
    assert_equal_networks(s, G=g)
    assert not s.game.d.flat.params.any()  # D never steps


def test_gradient_of_matching_is_that_of_the_paper():
    x = torch.randn(3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    teacher, critic = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64)
    matching_loss(x, teacher, critic).backward()
    scale = (x - teacher).abs().mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(x.grad.float(), ((critic - teacher) / scale / 32 / 3).float())


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("game", [DISTILL, DISTILL_UNET])
def test_distillation_equals_a_plain_loop(game):
    run = make_run(game, "sync", *WEIGHTS)
    s = tiny_run.make_session(run)
    teacher = s.game.objective.teacher
    with torch.no_grad():
        for p in teacher.parameters():  # far from D, which begins as the teacher: their difference is no rounding
            p.add_(0.1 * torch.randn_like(p))
    nets = networks_of(run)
    g, d = nets.g, nets.d
    opt = {net: torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.5, 0.9), eps=1e-3) for net in (g, d)}
    for _ in range(4):
        play_round(s)
        batch = s.lanes.micro_batches[0]

        def noisy(x, sigma, stream, rng=batch.rng):
            x = x + sigma.view(-1, 1, 1, 1) * rng.normal(f"noise/{stream}", *x.shape[1:])
            return with_noise_map(x, sigma)

        z, y = s.game.generator_inputs(batch, "D")
        with torch.no_grad():
            x = g(z, y)
        sigma = (-1.2 + 1.2 * batch.rng.normal("D/sigma", 1)[:, 0]).exp()
        fake, real = d(noisy(x, sigma, "D/fake"), y), d(noisy(batch.images, sigma, "D/real"), batch.labels)
        error = (fake.features[0] - x).square().mean((1, 2, 3))
        loss = ((sigma**2 + 0.25) / (sigma * 0.5) ** 2 * error).mean()
        loss = loss + 0.2 * (F.softplus(fake.logits).mean() + F.softplus(-real.logits).mean())
        opt[d].zero_grad(), loss.backward(), opt[d].step()
        z, y = s.game.generator_inputs(batch, "G")
        x = g(z, y)
        part = 0.02 + 0.96 * batch.rng.uniform("G/sigma", 1)[:, 0]
        largest = run.nets.sigma_max ** (1 / 7)
        sigma = (largest + part * (0.002 ** (1 / 7) - largest)) ** 7
        given = noisy(x, sigma, "G/fake")
        out = d(given, y)
        with torch.no_grad():
            target = teacher.denoise(given[:, :-1], sigma, y)
            step = (out.features[0] - target) / (x - target).abs().mean((1, 2, 3), keepdim=True)
        loss = (x * step).mean() + 0.3 * F.softplus(-out.logits).mean()
        opt[g].zero_grad(), loss.backward(), opt[g].step()
    assert_equal_networks(s, G=g, D=d)


def test_a_teacher_is_no_part_of_the_players():
    run = make_run(DISTILL, "sync")
    s = tiny_run.make_session(run)
    before = [p.clone() for p in s.game.objective.teacher.parameters()]
    for _ in range(2):
        play_round(s)
    assert all(map(torch.equal, before, s.game.objective.teacher.parameters()))
    assert dataclasses.is_dataclass(s.game.objective)


def test_networks_objective_and_strategy_must_go_together():
    with advises("objective=denoising: trains a denoiser, and --nets=dcgan has none. Use --nets=edm"):
        validate(tiny_run.make_run("objective=denoising"), 1)
    with advises(
        "--nets=edm: is a diffusion model, and objective=adversarial is of two players. Use --objective=denoising"
    ):
        validate(tiny_run.make_run(*SMALL_NETS), 1)
    with advises("--strategy=async: trains two players, and objective=denoising has one. Use --strategy=sync"):
        validate(make_run(DIFFUSION, "async"), 1)
    validate(make_run(DIFFUSION, "sync"), 1)
    with advises(
        "nets.steps=2 nets.critic=score: distillation trains a generator of one step. Use --nets.steps=1 "
        "--nets.critic=score"
    ):
        validate(make_run(DISTILL, "sync", "nets.steps=2", "distill_from=teacher"), 1)
    validate(make_run(DISTILL, "sync", "distill_from=teacher"), 1)
