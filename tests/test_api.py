"""The paper's interface, as it is printed there."""

from __future__ import annotations

import pytest
import torch
import toy
from torch import nn

import paragan as pg
from paragan.api import scaled


class Generator:
    latent = 8

    def __init__(self):
        self.layers = [nn.Linear(18, 32), nn.Linear(32, 64)]

    def model_fn(self, latent_var, y):
        h = self.layers[0](torch.cat([latent_var, nn.functional.one_hot(y, 10).float()], 1)).relu()
        return self.layers[1](h).tanh().view(-1, 1, 8, 8)


class Discriminator:
    def __init__(self):
        self.net = nn.Linear(74, 1)

    def model_fn(self, x, y):
        out_logit = self.net(torch.cat([x.flatten(1), nn.functional.one_hot(y, 10).float()], 1))
        return out_logit.sigmoid(), out_logit


class PlainG(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.norm = nn.Linear(8, 64), nn.BatchNorm2d(1)

    def forward(self, z, y):
        return self.norm(self.net(z).view(-1, 1, 8, 8)).tanh()


class PlainD(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 1)

    def forward(self, x, y):
        return self.net(x.flatten(1)).squeeze(1)


def config(**fields):
    return pg.Config(
        data=pg.Data(path="digits"), max_steps=5, evaluation=pg.Evaluation(metrics=("fd",), count=64), **fields
    )


def seeded(make):
    torch.manual_seed(0)
    return make()


def test_figure_5_runs_as_printed(capsys):
    cfg = config()
    scale_mgr = pg.ScalingManager(config=cfg, bs=64, num_workers=8)
    gan = pg.Estimator(Generator(), Discriminator())
    for _step in range(cfg.max_steps):
        scale_mgr.train(gan)
    score = scale_mgr.eval(metric="fid")
    scale_mgr.close()
    assert score.name in ("fd_pixels", "fid")
    assert scale_mgr._session.clock.step == 5
    shown = capsys.readouterr().out
    assert "learning rate" in shown
    assert "not FID" in shown or score.name == "fid"


def test_plain_modules_with_their_own_batch_norm():
    with pg.ScalingManager(config(latent=8), bs=32, num_workers=4) as scale_mgr:
        g, d = PlainG(), PlainD()
        gan = pg.Estimator(g, d)
        for _ in range(3):
            scale_mgr.train(gan)
        assert g.norm.num_batches_tracked == 3


def test_workers_are_logical(pool):
    """The same script gives the same training on one rank and on two."""
    toy  # noqa: B018 - registered by value

    def job(world):
        scale_mgr = pg.ScalingManager(config(), 32, 4)
        scale_mgr.world = world
        gan = pg.Estimator(seeded(Generator), seeded(Discriminator))
        for _ in range(5):
            scale_mgr.train(gan)
        scale_mgr._session.lanes.close()
        return torch.cat([p.flatten() for p in gan.generator.parameters()])

    one = job(toy.World.solo())
    for several in pool(2, job):
        torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-6)


def test_ranks_start_from_the_weights_of_rank_0(pool):
    def job(world):
        torch.manual_seed(world.rank)
        scale_mgr = pg.ScalingManager(config(), 32, 4)
        scale_mgr.world = world
        gan = pg.Estimator(Generator(), Discriminator())
        scale_mgr.train(gan)
        scale_mgr._session.lanes.close()
        return torch.cat([p.flatten() for p in gan.generator.parameters()])

    a, b = pool(2, job)
    assert torch.equal(a, b)


def test_rates_follow_the_rule_of_each_network():
    cfg = config(g_rule="linear", d_rule="none", warm_up_steps=10)
    run = scaled(cfg, 256, 8)
    assert run.g.optimizer.lr == pytest.approx(8e-4)
    assert run.d.optimizer.lr == pytest.approx(2e-4)
    assert run.g.warm_up_kimg == pytest.approx(10 * 2 * 256 / 1000)
    assert run.d.warm_up_kimg == 0


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda: pg.Estimator(object(), PlainD()), "the generator is neither"),
        (lambda: pg.Estimator(nn.Identity(), PlainD()), "no parameters"),
        (lambda: pg.ScalingManager(config(), bs=30, num_workers=8), "does not divide"),
        (lambda: pg.ScalingManager(config(), bs=0, num_workers=8), "1 or more"),
        (lambda: pg.ScalingManager(config(), bs=8, num_workers=8).eval(), "nothing was trained"),
    ],
)
def test_mistakes_are_one_clear_line(mistake, words):
    with pytest.raises(pg.Unusable, match=words):
        mistake()
