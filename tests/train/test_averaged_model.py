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


class FailingGroup(SingleRankGroup):
    """Doubles what it sums, as for two ranks that agree, and fails at a call, its sum half done."""

    size = 2

    def __init__(self, fail_at):
        object.__setattr__(self, "remaining", [fail_at])

    def all_reduce_sum(self, x):
        self.remaining[0] -= 1
        x *= 2
        if self.remaining[0] == 0:
            raise CommunicationError("gone")
        return super().all_reduce_sum(x)


def make_session(fail_at):
    def player(name, ema):
        net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        return Player(name, net, lambda p: torch.optim.SGD(p, lr=0.1), ema=ema)

    players = [player("G", EMAConfig()), player("D", None)]
    world, game = SimpleNamespace(all_ranks=FailingGroup(fail_at)), SimpleNamespace(players=players)
    return SimpleNamespace(role=Role((), LaneShare((), 1), replicated=False), world=world, game=game)


def copy_tensors(session):
    averages = [p.ema.params.clone() for p in session.game.players if p.ema]
    return averages + [t.clone() for p in session.game.players for t in (p.flat.params, *p.net.state_dict().values())]


@pytest.mark.parametrize("fail_at", range(1, 7))
def test_a_failed_reduction_changes_no_tensor(fail_at):
    session = make_session(fail_at)
    before = copy_tensors(session)
    with pytest.raises(CommunicationError), averaged_networks(session):
        pass
    for now, then in zip(copy_tensors(session), before, strict=True):
        assert torch.equal(now, then)
