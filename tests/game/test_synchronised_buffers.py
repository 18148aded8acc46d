"""Buffers that a module declares are summed over passes, lanes and ranks, and applied once a step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from advice import advises
from paragan.comm.process_group import SingleRankGroup
from paragan.core.errors import UsageError
from paragan.game.player import Player


class Counter(nn.Module):
    """Counts rows and sums them; `seen` is what `apply_synchronised` found."""

    synchronised = ("count", "total")

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("total", torch.zeros(3, dtype=dtype))
        self.seen = []

    def forward(self, x):
        if self.training:
            self.count += len(x)
            self.total = self.total + x.detach().sum(0)  # replaces the buffer
        return x * self.scale

    def apply_synchronised(self):
        self.seen.append((int(self.count), self.total.tolist()))
        self.total.zero_()


def make_player(dtype=torch.float32, net=None):
    net = net or nn.Sequential(Counter(dtype))
    return Player("G", net, lambda p: torch.optim.SGD(p, lr=0.0)), net[0]


def play_step(player, *batches, team=None):
    with player.tracking_moments():
        for batch in batches:
            player.net(batch)
    player.all_reduce_moments(team or SingleRankGroup())
    player.step(0, 0)


def test_the_changes_of_all_passes_are_applied_at_the_step():
    player, counter = make_player()
    address = counter.total.data_ptr()
    play_step(player, torch.ones(2, 3), torch.ones(3, 3))
    assert counter.seen == [(5, [5.0] * 3)]
    assert int(counter.count) == 5  # it moves on
    play_step(player, torch.ones(1, 3))
    assert counter.seen[1:] == [(6, [1.0] * 3)]
    assert counter.total.data_ptr() == address


def test_passes_outside_a_turn_and_in_evaluation_mode_change_nothing():
    player, counter = make_player()
    player.net(torch.ones(2, 3))
    player.net.eval()
    play_step(player, torch.ones(2, 3))
    assert counter.seen == [(0, [0.0] * 3)]
    with pytest.raises(RuntimeError, match="must match"):
        player.net.train()(torch.ones(2, 4))
    assert int(counter.count) == 0


def test_a_pass_that_backward_repeats_counts_once():
    player, counter = make_player()
    with player.requiring_grad():
        with player.tracking_moments():
            y = torch.utils.checkpoint.checkpoint(player.net, torch.ones(2, 3), use_reentrant=False)
        y.sum().backward()
    player.all_reduce_moments(SingleRankGroup())
    player.step(0, 0)
    assert counter.seen == [(2, [2.0] * 3)]


def test_changes_are_summed_over_ranks_in_the_precision_of_float32_at_least(pool):
    def job(world):
        player, counter = make_player(torch.bfloat16)
        rows = 200 + world.rank  # 601 has no bfloat16
        play_step(player, torch.ones(rows, 3, dtype=torch.bfloat16), team=world.all_ranks)
        return int(counter.count)

    assert pool(3, job) == [603] * 3


def test_a_network_may_be_trained_by_a_second_player_and_copied():
    first, counter = make_player()
    first.net.requires_grad_(True)
    player, _ = make_player(net=nn.Sequential(counter))
    play_step(player, torch.ones(2, 3))
    assert counter.seen == [(2, [2.0] * 3)]
    other = copy.deepcopy(player.net)
    other(torch.ones(4, 3))
    play_step(player, torch.ones(1, 3))
    assert counter.seen[1:] == [(3, [1.0] * 3)]


def test_a_declared_buffer_that_does_not_exist_is_refused():
    counter = Counter()
    counter.synchronised = ("size",)
    with advises("0: synchronised names 'size', which is no buffer. Use count, total"):
        make_player(net=nn.Sequential(counter))
    counter.synchronised = ("count", "total")
    make_player(net=nn.Sequential(counter))
    empty = nn.Sequential(nn.Linear(2, 2))
    empty[0].synchronised = ("size",)
    with pytest.raises(UsageError, match="Use names of buffers, made with register_buffer"):
        make_player(net=empty)
