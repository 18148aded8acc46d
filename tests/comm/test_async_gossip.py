"""Gossip over links that may lag: the mean is kept under any delay, and nobody waits longer than was said."""

from __future__ import annotations

import itertools
import threading
import time
import types

import pytest
import torch

SIZE, STEPS = 4, 40


def drifting(staleness, slow_ms):
    """A job: parameters that move by their rank every step, on a ring; one rank is slow. Returns the clock at every
    step, the parameters at the end and what they would be without mixing."""

    def job(world):
        import time

        from torch import nn

        from paragan.comm.topology import Ring
        from paragan.game.player import Player
        from paragan.strategies.gossip_dposg import AsyncGossipLinks

        net = nn.Linear(300, 7)
        nn.init.constant_(net.weight, world.rank)
        nn.init.constant_(net.bias, -world.rank)
        player = Player("G", net, lambda p: torch.optim.SGD(p, lr=0.1), bucket_bytes=4096)
        late = AsyncGossipLinks(Ring(), world, staleness)
        mixing, alone, times = late.make_exchange(player), player.flat.params.clone(), []
        for step in range(STEPS):
            time.sleep(slow_ms / 1000 if world.rank == 3 else 0.002)
            with player.flat.exchanging(mixing, step):
                pass
            player.flat.finish()
            player.flat.params += 0.01 * (world.rank + 1)
            alone += 0.01 * (world.rank + 1)
            times.append(time.time())
        late.drain()
        return times, player.flat.params.clone(), alone

    return job


@pytest.mark.parametrize(("staleness", "slow_ms"), [(1, 2), (8, 2), (8, 20), (1000, 20)])
def test_the_mean_is_kept_under_any_delay(pool, staleness, slow_ms):
    found = pool(SIZE, drifting(staleness, slow_ms))
    mixed, alone = (torch.stack([row[i] for row in found]).double() for i in (1, 2))
    assert (mixed.mean(0) - alone.mean(0)).abs().max() < 1e-5
    assert (mixed - mixed.mean(0)).norm() < 0.5 * (alone - alone.mean(0)).norm()


def test_nobody_waits_longer_than_was_said(pool):
    """Rank 3 takes 20 ms a step, the others 2. Who waits for every swap keeps its pace, who need not does not."""
    for staleness, held_up in ((0, True), (1000, False)):
        found = pool(SIZE, drifting(staleness, 20))
        fast, slow = found[0][0], found[3][0]
        ahead = max(sum(t <= at for t in fast) - sum(t <= at for t in slow) for at in fast)
        assert (ahead <= 3) == held_up
        assert (fast[-1] - fast[0] > 0.7 * (slow[-1] - slow[0])) == held_up


def test_with_every_step_waited_for_it_is_the_ring(pool):
    def job(world):
        import torch
        from torch import nn

        from paragan.comm.gossip import Gossip
        from paragan.comm.topology import Ring
        from paragan.game.player import Player
        from paragan.strategies.gossip_dposg import AsyncGossipLinks

        ends = []
        for kind in ("late", "ring"):
            torch.manual_seed(world.rank)
            player = Player("G", nn.Linear(30, 7), lambda p: torch.optim.SGD(p, lr=0.1))
            late = AsyncGossipLinks(Ring(), world, 0)
            mixing = late.make_exchange(player) if kind == "late" else Gossip(Ring(), world.all_ranks)
            for step in range(5):
                with player.flat.exchanging(mixing, step):
                    pass
                player.flat.finish()
                player.flat.params.mul_(1.1).add_(0.1 * world.rank)
            ends.append(player.flat.params.clone())
        return ends

    for late, ring in pool(SIZE, job):
        assert torch.allclose(late, ring, atol=1e-5)


def test_a_swap_that_has_arrived_is_mixed_while_an_older_one_is_under_way():
    """Else two ends wait for each other, each behind a swap that the other begins when it has seen the next."""
    from paragan.comm.async_gossip import AsyncGossip
    from paragan.comm.bucket import Bucket
    from paragan.comm.process_group import WaitThread

    class Held:
        """A link to another rank, whose messages arrive when they are let go."""

        rank, size = 0, 2

        def __init__(self):
            self.let_go = [threading.Event(), threading.Event()]

        def send_recv(self, sends, recvs, tag=0):
            recvs[1].fill_(1.0)
            return types.SimpleNamespace(wait=lambda: self.let_go[tag - 1].wait(20))

    link = Held()
    mixing = AsyncGossip({1: 0.5}, {1: link}, lambda j: WaitThread(20.0), 100, 1)  # pyright: ignore[reportArgumentType]
    buckets = [Bucket(torch.zeros(3), torch.zeros(3), i, [(0, "w")]) for i in range(2)]
    list(mixing(buckets[0], 0)), list(mixing(buckets[1], 0))
    link.let_go[1].set()
    deadline = time.monotonic() + 10
    for step in itertools.count(1):
        list(mixing(buckets[0], step)), list(mixing(buckets[1], step))
        if buckets[1].params[0] or step == 90 or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    link.let_go[0].set()
    assert buckets[0].params.tolist() == [0.0] * 3
    assert buckets[1].params.tolist() == [0.5] * 3
