"""The check that all ranks hold the same: faults of published training loops are named, healthy loops say nothing."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from advice import advises
from paragan.comm.replica_check import ReplicasDiffer, check_replicas, digest

Z, X = 4, 6


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(Z, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, X))


class Discriminator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(X, 8), nn.LeakyReLU(), nn.Linear(8, 1))


class Quantizer(nn.Module):
    """A codebook that follows the mean of its inputs, as those of VQ-VAEs do."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("codebook", torch.zeros(X))

    def forward(self, x):
        self.codebook.lerp_(x.detach().mean(0), 0.1)
        return self.scale * x + self.codebook


def build():
    torch.manual_seed(0)
    return Generator(), Discriminator()


def train(rank, steps, *, around_wrapper=False, every=1):
    """Train two networks under DistributedDataParallel, and check after every step."""
    g, d = map(DistributedDataParallel, build())
    opt_g, opt_d = (torch.optim.Adam(net.parameters(), 1e-3) for net in (g, d))
    judge = d.module if around_wrapper else d
    for step in range(steps):
        rng = torch.Generator().manual_seed(1000 * step + rank)
        z, real = torch.randn(8, Z, generator=rng), torch.randn(8, X, generator=rng)
        opt_d.zero_grad()
        (judge(g(z).detach()) - judge(real)).mean().backward()
        opt_d.step()
        opt_g.zero_grad()
        d.requires_grad_(False)
        (-judge(g(z))).mean().backward()
        d.requires_grad_(True)
        opt_g.step()
        check_replicas(g, d, opt_g, opt_d, every=every)


def catch(action):
    try:
        action()
    except ReplicasDiffer as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_200_checks_of_a_healthy_loop_say_nothing(pool):
    assert pool(2, lambda world: catch(lambda: train(world.rank, 200))) == ["", ""]


def test_a_discriminator_that_is_called_around_its_wrapper_is_found_at_the_first_check(pool):
    for message in pool(2, lambda world: catch(lambda: train(world.rank, 1, around_wrapper=True))):
        assert message.startswith("step 1: Discriminator 0.weight on rank 1 differs from that of rank 0, by up to")
        assert message.endswith("It was never equal at a check")


def test_a_call_around_the_wrapper_is_warned_of_from_the_first_check_on(pool):
    def job(world):
        _, d = map(DistributedDataParallel, build())
        check_replicas(d, every=100)
        d(torch.zeros(2, X))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with advises(
                "Discriminator is called around its DistributedDataParallel: gradients of this pass are not averaged "
                "over ranks. Call the wrapper, or freeze the network where another one is trained",
                UserWarning,
            ):
                d.module(torch.zeros(2, X))
            d.module(torch.zeros(2, X))  # once is enough

    pool(2, job)


def test_a_network_that_is_frozen_may_be_called_around_its_wrapper(pool):
    def job(world):
        _, d = map(DistributedDataParallel, build())
        check_replicas(d)
        d.requires_grad_(False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            d.module(torch.zeros(2, X))

    pool(2, job)


def test_a_codebook_that_every_rank_updates_alone_is_found(pool):
    def job(world):
        quantizer = DistributedDataParallel(Quantizer())
        rng = torch.Generator().manual_seed(world.rank)
        check_replicas(quantizer, step=10)
        quantizer(torch.randn(8, X, generator=rng)).sum().backward()
        return catch(lambda: check_replicas(quantizer, step=20)), catch(
            lambda: check_replicas(quantizer, ignore=["* codebook"])
        )

    for message, ignored in pool(2, job):
        assert message.startswith("step 20: Quantizer codebook on rank 1 differs")
        assert message.endswith("It was equal at step 10")
        assert not ignored


def test_it_says_by_how_much(pool):
    def job(world):
        net = nn.Linear(2, 1, bias=False)
        nn.init.constant_(net.weight, 3.0)
        if world.rank == 2:
            net.weight.data[0, 1] += 0.5
        return catch(lambda: check_replicas(net))

    for message in pool(3, job):
        assert "Linear weight on rank 2 differs from that of rank 0, by up to 0.5, 0.12 of its norm" in message


def test_the_state_of_an_optimizer_is_compared(pool):
    def job(world):
        net = nn.Linear(2, 1)
        nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.9)
        net(torch.full((1, 2), float(world.rank))).sum().backward()
        optimizer.step()
        return catch(lambda: check_replicas(net, optimizer)), catch(lambda: check_replicas(net))

    for message, from_network in pool(2, job):
        assert "SGD momentum_buffer of Linear weight on rank 1 differs" in message
        assert not from_network


def test_the_order_of_an_optimizers_state_does_not_matter(pool):
    """Files give it back in another one."""

    def job(world):
        net = nn.Linear(2, 1)
        nn.init.zeros_(net.weight), nn.init.zeros_(net.bias)
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if world.rank:
            for p, state in list(optimizer.state.items()):
                optimizer.state[p] = dict(reversed(state.items()))
        return catch(lambda: check_replicas(net, optimizer))

    assert pool(2, job) == ["", ""]


def test_ranks_with_different_networks_are_told_the_first_tensor(pool):
    def job(world):
        return catch(lambda: check_replicas(nn.Linear(2, 3 + world.rank), nn.Linear(1, 1)))

    for message in pool(2, job):
        assert "Linear 1 weight float32 [3, 2] on rank 0, Linear 1 weight float32 [4, 2] on rank 1" in message


def test_it_checks_at_every_so_many_calls(pool):
    def job(world):
        net = nn.Linear(1, 1)
        nn.init.constant_(net.weight, float(world.rank))
        return [bool(catch(lambda: check_replicas(net, every=3))) for _ in range(6)]

    assert pool(2, job) == [[False, False, True, False, False, True]] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_one_bit_changes_the_digest(dtype):
    x = torch.ones(7, dtype=dtype)
    for i in range(7):
        changed = x.clone()
        changed[i] = 0
        assert not torch.equal(digest(changed), digest(x))


def test_bad_input_is_named():
    net = nn.Linear(1, 1)
    with advises("check_replicas: has nothing to compare. Use check_replicas(generator, discriminator)"):
        check_replicas()
    check_replicas(net, nn.Linear(1, 1))
    with advises("check_replicas: Tensor has no tensors. Use a module or an optimizer"):
        check_replicas(net, torch.zeros(3))
    check_replicas(net, torch.optim.SGD(net.parameters()))
    with advises("every=0: must be positive. Use 1 or more"):
        check_replicas(net, every=0)
    check_replicas(net, every=1)


def test_one_process_has_nothing_to_compare():
    check_replicas(nn.Linear(1, 1))
