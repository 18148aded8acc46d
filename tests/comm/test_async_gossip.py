"""Asynchronous gossip preserves the mean under any delay, and no rank waits beyond `max_staleness`."""

from __future__ import annotations

import itertools
import threading
import time
import types

import pytest
import torch

SIZE, STEPS = 4, 40


def drift_job(max_staleness, slow_ms):
    """Make a job on a ring: parameters move by a constant of the rank every step; rank 3 is slow.

    Returns the time of every step, the final parameters, and what they would be without gossip.
    """

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
        links = AsyncGossipLinks(Ring(), world, max_staleness)
        exchange = links.make_exchange(player)
        without_gossip = player.flat.params.clone()
        times = []
        for step in range(STEPS):
            time.sleep(slow_ms / 1000 if world.rank == 3 else 0.002)
            with player.flat.exchanging(exchange, step):
                pass
            player.flat.finish()
            player.flat.params += 0.01 * (world.rank + 1)
            without_gossip += 0.01 * (world.rank + 1)
            times.append(time.time())
        links.drain()
        return times, player.flat.params.clone(), without_gossip

    return job


@pytest.mark.slow(after=2)
@pytest.mark.parametrize(("max_staleness", "slow_ms"), [(1, 2), (8, 2), (8, 20), (1000, 20)])
def test_mean_is_preserved_under_any_delay(pool, max_staleness, slow_ms):
    results = pool(SIZE, drift_job(max_staleness, slow_ms))
    mixed = torch.stack([params for _, params, _ in results]).double()
    without_gossip = torch.stack([params for _, _, params in results]).double()
    assert (mixed.mean(0) - without_gossip.mean(0)).abs().max() < 1e-5
    assert (mixed - mixed.mean(0)).norm() < 0.5 * (without_gossip - without_gossip.mean(0)).norm()


def test_no_rank_waits_beyond_max_staleness(pool):
    """Rank 3 takes 20 ms per step, the others 2 ms. Only a rank that waits for every swap becomes as slow."""
    for max_staleness, is_held_up in ((0, True), (1000, False)):
        results = pool(SIZE, drift_job(max_staleness, 20))
        fast, slow = results[0][0], results[3][0]
        lead = max(sum(t <= now for t in fast) - sum(t <= now for t in slow) for now in fast)
        assert (lead <= 3) == is_held_up
        assert (fast[-1] - fast[0] > 0.7 * (slow[-1] - slow[0])) == is_held_up


def test_without_staleness_it_equals_the_ring(pool):
    def job(world):
        import torch
        from torch import nn

        from paragan.comm.gossip import Gossip
        from paragan.comm.topology import Ring
        from paragan.game.player import Player
        from paragan.strategies.gossip_dposg import AsyncGossipLinks

        final_params = []
        for kind in ("async", "ring"):
            torch.manual_seed(world.rank)
            player = Player("G", nn.Linear(30, 7), lambda p: torch.optim.SGD(p, lr=0.1))
            links = AsyncGossipLinks(Ring(), world, 0)
            exchange = links.make_exchange(player) if kind == "async" else Gossip(Ring(), world.all_ranks)
            for step in range(5):
                with player.flat.exchanging(exchange, step):
                    pass
                player.flat.finish()
                player.flat.params.mul_(1.1).add_(0.1 * world.rank)
            final_params.append(player.flat.params.clone())
        return final_params

    for asynchronous, ring in pool(SIZE, job):
        assert torch.allclose(asynchronous, ring, atol=1e-5)


def test_swap_of_one_bucket_completes_while_that_of_another_is_pending():
    """Otherwise both ends could wait for each other, each behind a swap that the other starts only after the next."""
    from paragan.comm.async_gossip import AsyncGossip
    from paragan.comm.bucket import Bucket
    from paragan.comm.process_group import WaitThread

    class HeldGroup:
        """A pair of ranks; the message of a tag arrives when its event is set."""

        rank, size = 0, 2

        def __init__(self):
            self.arrivals = [threading.Event(), threading.Event()]

        def send_recv(self, sends, recvs, tag=0):
            recvs[1].fill_(1.0)
            return types.SimpleNamespace(wait=lambda: self.arrivals[tag - 1].wait(20))

    group = HeldGroup()
    exchange = AsyncGossip({1: 0.5}, {1: group}, lambda j: WaitThread(20.0), 100, 1)  # pyright: ignore[reportArgumentType]
    buckets = [Bucket(torch.zeros(3), torch.zeros(3), i, [(0, "w")]) for i in range(2)]
    for bucket in buckets:
        list(exchange(bucket, 0))
    group.arrivals[1].set()
    deadline = time.monotonic() + 10
    for step in itertools.count(1):
        for bucket in buckets:
            list(exchange(bucket, step))
        if buckets[1].params[0] or step == 90 or time.monotonic() > deadline:
            break
        time.sleep(0.01)
    group.arrivals[0].set()
    assert buckets[0].params.tolist() == [0.0] * 3
    assert buckets[1].params.tolist() == [0.5] * 3


def test_a_barrier_ends_when_a_rank_is_lost():
    from paragan.comm.async_gossip import barrier
    from paragan.comm.process_group import CommunicationError, WaitThread

    never = threading.Event()
    group = types.SimpleNamespace(all_reduce_sum=lambda x: types.SimpleNamespace(wait=never.wait))
    wait_thread = WaitThread(60)
    threading.Timer(0.05, wait_thread.abandon).start()
    with pytest.raises(CommunicationError, match="a peer was lost"):
        barrier([], group, wait_thread)  # pyright: ignore[reportArgumentType]
    never.set()
