"""The mean over ranks, where somebody is lost while it is taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from paragan.comm.process_group import CommunicationError, SingleRankGroup
from paragan.game.ema import EMAConfig
from paragan.game.player import Player
from paragan.strategies.base import LaneShare, Role
from paragan.train.averaged_model import averaged_networks


class Failing(SingleRankGroup):
    """Doubles what it sums, as for two ranks that agree, and fails at a call, its sum half done."""

    size = 2

    def __init__(self, at):
        object.__setattr__(self, "left", [at])

    def sum(self, x):
        self.left[0] -= 1
        x *= 2
        if self.left[0] == 0:
            raise CommunicationError("gone")
        return super().all_reduce_sum(x)


def table(at):
    def player(name, average):
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        return Player(name, net, lambda p: torch.optim.SGD(p, lr=0.1), ema=average)

    players = [player("G", EMAConfig()), player("D", None)]
    world, game = SimpleNamespace(everyone=Failing(at)), SimpleNamespace(players=players)
    return SimpleNamespace(role=Role((), LaneShare((), 1), replicated=False), world=world, game=game)


def held(session):
    averages = [p.ema.params.clone() for p in session.game.players if p.ema]
    return averages + [t.clone() for p in session.game.players for t in (p.flat.params, *p.net.state_dict().values())]


@pytest.mark.parametrize("at", range(1, 9))
def test_a_sum_that_fails_leaves_everyone_as_he_was(at):
    session = table(at)
    before = held(session)
    with pytest.raises(CommunicationError), averaged_networks(session):
        pass
    for now, then in zip(held(session), before, strict=True):
        assert torch.equal(now, then)
