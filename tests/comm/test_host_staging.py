"""Groups of gloo on the stand-in accelerator: they deliver what they deliver on CPUs."""

from __future__ import annotations

import torch

import standin


def exchange_everything(world):
    group = world.pair_group(1 - world.rank)
    x = torch.arange(6.0, device=world.device).view(2, 3) + 10 * world.rank
    total, received, transposed = x.clone(), torch.zeros_like(x), torch.zeros_like(x)
    group.all_reduce_sum(total).wait()
    gathered, work = group.all_gather(x[0])
    work.wait()
    into, work = group.all_gather(x[1], torch.empty(2, 3, device=world.device))
    work.wait()
    group.all_to_all(x, transposed).wait()
    group.send_recv({1 - world.rank: x}, {1 - world.rank: received}).wait()
    on_host = torch.zeros(1, 3)
    group.send_recv({1 - world.rank: x[:1].cpu()}, {1 - world.rank: on_host}).wait()
    return [t.cpu() for t in (x, total, gathered, into, transposed, received, on_host)]


def test_every_message_arrives_on_the_device(pool):
    def job(world):
        return exchange_everything(world)

    for on_device, on_cpu in zip(pool(2, job, standin.NAME), pool(2, job)):
        assert all(torch.equal(a, b) for a, b in zip(on_device, on_cpu, strict=True))


def test_the_host_waits_before_it_sends_and_not_for_what_arrives(pool):
    def job(world):
        group = world.pair_group(1 - world.rank)
        x = torch.ones(4, device=world.device)
        with standin.recording() as syncs:
            work = group.all_reduce_sum(x)
        with standin.recording() as later:
            work.wait()
            x.mul_(2)
        return [sync.name for sync in syncs], later, x.cpu()

    for sending, receiving, x in pool(2, job, standin.NAME):
        assert sending == ["event.synchronize"]
        assert not receiving
        assert x.tolist() == [4.0] * 4
