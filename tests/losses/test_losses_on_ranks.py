"""Any number of ranks computes the same objective, with all of its terms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import tiny_run
from paragan.comm.world import World
from paragan.config.resolve import resolve
from paragan.core.types import DiscriminatorOutput
from paragan.train.build import Networks
from paragan.train.loop import play_round
from paragan.train.session import build_session

SETTINGS = {
    "consistency": ("objective.zcr=5", "objective.zcr_g=0.5", "objective.bcr=10", "objective.augment=diffaugment"),
    "orthogonal": (
        "objective.orthogonal=1e-2",
        "objective.d_orthogonal=1e-2",
        "objective.cr=10",
        "device.lanes_per_pass=1",
    ),
    "finite differences": (
        *("objective.r1=1", "objective.r2=1", "objective.r1_r2_method=finite_difference", "objective.center=0.1"),
        "objective.difference_sigma=0.1",
    ),
    "one call": ("device.concat_real_fake=true", "objective.loss=least_squares", "nets.spectral=false"),
}


@pytest.mark.slow(after=3)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_n_ranks_equal_one(pool, settings, ranks):
    run = tiny_run.make_run(*settings, "nets.batch_norm=true")
    one = tiny_run.play_rounds(run, 6)
    for several in pool(ranks, lambda world: tiny_run.play_rounds(run, 6, world)):
        for network in ("G/", "D/"):
            assert tiny_run.relative_distance(several, one, network) < 1e-5


class TwoHeadedD(nn.Module):
    """A discriminator with both heads."""

    def __init__(self):
        super().__init__()
        self.first, self.logit = nn.Linear(64, 32), nn.Linear(32, 1)
        self.classes, self.embed, self.proxies = nn.Linear(32, 10), nn.Linear(32, 8), nn.Embedding(10, 8)

    def forward(self, x, y):
        h = self.first(x.flatten(1)).tanh()
        outputs = (
            self.logit(h)[:, 0],
            self.classes(h),
            normalize(self.embed(h), dim=1),
            normalize(self.proxies(y), dim=1),
        )
        return DiscriminatorOutput(*outputs)


class LinearG(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.image = nn.Embedding(10, 8), nn.Linear(16, 64)

    def forward(self, z, y):
        return self.image(torch.cat([z, self.embed(y)], 1)).tanh().view(-1, 1, 8, 8)


def play(run, world):
    torch.manual_seed(1)
    images = tiny_run.make_dataset()
    s = build_session(resolve(run, images), world, images, Networks(LinearG(), TwoHeadedD(), 8))
    for _ in range(6):
        play_round(s)
    return tiny_run.session_state(s), s.stats.mean_losses()


@pytest.mark.parametrize("name", ["classifier", "contrastive"])
def test_n_ranks_equal_one_with_class_losses(pool, name):
    run = tiny_run.make_run(f"objective.{name}=1", "objective.temperature=0.5", "batch=32")
    one, losses = play(run, World.solo())
    assert losses[f"Loss/G/{name}"] > 0
    for several, logged in pool(3, lambda world: play(run, world)):
        assert tiny_run.relative_distance(several, one, "D/") < 1e-5
        assert tiny_run.relative_distance(several, one, "G/") < 1e-5
        assert logged == pytest.approx(losses, rel=1e-4, abs=1e-6)
