"""What people report of several networks under DistributedDataParallel, Lightning and accelerate, and the loop here.

Each test names its reports, shows the fault under DDP, and what `paragan.Replica` makes of the loop. docs/ddp.md has
the table.
"""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import paragan
from paragan.api import turn_summary

Z, X = 4, 6
STEPS = 3
ONE_ALL_REDUCE = 2  # messages between two ranks
UNUSED = "Expected to have finished reduction in the prior iteration"
READY_TWICE = "Expected to mark a variable ready only once"
IN_PLACE = "modified by an inplace operation"


class Both(nn.Module):
    """Generator and discriminator in one module, as in a LightningModule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(Z, X), nn.Linear(X, 1)

    def forward(self, x, part):
        return getattr(self, part)(x)


def draw(rank, step=0):
    """Return latents and reals of a rank, other ones on every rank."""
    rng = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, Z, generator=rng), torch.randn(8, X, generator=rng)


def draw_all(ranks, step=0):
    return [torch.cat(parts) for parts in zip(*(draw(rank, step) for rank in range(ranks)))]


def d_loss(g, d, z, real):
    return d(g(z).detach()).square().mean() + (d(real) - 1).square().mean()


def g_loss(g, d, z):
    return (d(g(z)) - 1).square().mean()


def sgd(*nets):
    return torch.optim.SGD([p for net in nets for p in net.parameters()], 0.1)


def weights(*nets):
    return torch.cat([p.detach().flatten() for net in nets for p in net.parameters()])


def gradient(*nets):
    return torch.cat([p.grad.flatten() for net in nets for p in net.parameters()])


def message_of(action):
    """Return what a RuntimeError of `action` says; "" if there is none."""
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return ""


def train_alone(ranks):
    """Return the weights after training in one process, on the batches of all ranks."""
    both = Both()
    opt_g, opt_d = sgd(both.g), sgd(both.d)
    for step in range(STEPS):
        z, real = draw_all(ranks, step)
        for optimizer, loss in ((opt_d, d_loss), (opt_g, lambda g, d, z, real: g_loss(g, d, z))):
            both.zero_grad()
            loss(both.g, both.d, z, real).backward()
            optimizer.step()
    return weights(both)


def train_replicas(world):
    """Return the weights after the same training with a replica of each network."""
    both = Both()
    gen, disc = paragan.Replica(both.g, sgd(both.g), world=world), paragan.Replica(both.d, sgd(both.d), world=world)
    for step in range(STEPS):
        z, real = draw(world.rank, step)
        with disc.turn():
            d_loss(both.g, both.d, z, real).backward()
        with gen.turn():
            g_loss(both.g, both.d, z).backward()
        paragan.check_replicas(gen, disc)
    return weights(both)


def assert_trained_together(results):
    """Assert that ranks have the same weights, those of one process."""
    for result in results:
        assert torch.equal(result, results[0])
        torch.testing.assert_close(result, train_alone(len(results)), rtol=1e-6, atol=1e-7)


# one wrapper around several networks --------------------------------------------------------------------------------


def test_one_wrapper_around_both_networks_waits_for_the_gradients_of_both(pool):
    """Lightning#20866, #20328 (the GAN example under DDP) and #20138 (the same wrapper, FSDP)."""

    def job(world):
        ddp = DistributedDataParallel(Both())
        z, real = draw(world.rank)

        def train():
            ddp(ddp(z, "g"), "d").mean().backward()  # both networks have gradients
            ddp(real, "d").mean().backward()  # G has none
            ddp(real, "d")

        return message_of(train), train_replicas(world)

    messages, trained = zip(*pool(2, job))
    assert all(message.startswith(UNUSED) for message in messages)
    assert_trained_together(trained)


def test_looking_for_unused_parameters_marks_them_ready_twice(pool):
    """Lightning#20328 and #20866, where find_unused_parameters=True is the advice; Lightning#4953 has the message."""

    def job(world):
        ddp = DistributedDataParallel(Both(), find_unused_parameters=True)
        z, real = draw(world.rank)
        message = message_of(lambda: (ddp(z, "g").mean() + ddp(real, "d").mean()).backward())
        return message, train_replicas(world)

    messages, trained = zip(*pool(2, job))
    assert all(message.startswith(READY_TWICE) for message in messages)
    assert_trained_together(trained)


def test_one_replica_may_hold_networks_of_which_a_loss_uses_some(pool):
    """Lightning#20866, #20138: one optimizer over everything. Parameters without a gradient stay as they are."""

    def job(world):
        both = Both()
        everything = paragan.Replica([both.g, both.d], sgd(both), world=world)
        _, real = draw(world.rank)
        before = weights(both.g)
        with everything.turn():
            both.d(real).square().mean().backward()
        return torch.equal(weights(both.g), before), weights(both.d)

    alone = Both()
    alone.d(draw_all(2)[1]).square().mean().backward()
    sgd(alone.d).step()
    for is_untouched, trained in pool(2, job):
        assert is_untouched
        torch.testing.assert_close(trained, weights(alone.d), rtol=1e-6, atol=1e-7)


# networks that are called around their wrappers ---------------------------------------------------------------------


def around_the_wrapper(both):
    """Return D as a published loop calls it: `discriminator = ddp_disc.module`."""
    return DistributedDataParallel(both.d).module


def without_a_wrapper(both):
    return both.d


def part_of_the_wrapped_whole(both):
    return DistributedDataParallel(both).module.d


@pytest.mark.parametrize(
    "discriminator_of",
    [
        pytest.param(around_the_wrapper, id="RAE#17"),
        pytest.param(without_a_wrapper, id="RALF#21"),
        pytest.param(part_of_the_wrapped_whole, id="e2eAIOK#198"),
    ],
)
def test_a_discriminator_that_ddp_never_sees_drifts_apart(pool, discriminator_of):
    def job(world):
        both = Both()
        d = discriminator_of(both)
        optimizer = sgd(d)
        for step in range(STEPS):
            optimizer.zero_grad()
            d_loss(both.g, d, *draw(world.rank, step)).backward()
            optimizer.step()
        return weights(d), train_replicas(world)

    drifted, trained = zip(*pool(2, job))
    assert (drifted[0] - drifted[1]).abs().max() > 0.01  # without a word
    assert_trained_together(trained)


def test_a_discriminator_that_was_forgotten_is_found_by_the_check(pool):
    """RALF#21 here: G has a replica, and D steps by hand."""

    def job(world):
        both = Both()
        gen, opt_d = paragan.Replica(both.g, sgd(both.g), world=world), sgd(both.d)
        d_loss(both.g, both.d, *draw(world.rank)).backward()
        opt_d.step()
        try:
            paragan.check_replicas(gen, both.d)
        except paragan.ReplicasDiffer as error:
            return str(error)
        return ""

    for message in pool(2, job):
        assert message.startswith("step 1: Linear")
        assert "weight on rank 1 differs from that of rank 0" in message


# several passes -----------------------------------------------------------------------------------------------------


def test_buffers_are_overwritten_by_the_second_forward_pass(pool):
    """pytorch#175024: reals and fakes in two passes, then one backward.

    torch 2.13 does not say it any longer. Its ranks still end the step with other statistics of batch norm.
    """

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(X, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def job(world):
        rng = torch.Generator().manual_seed(world.rank)
        real, fake = torch.randn(2, 8, X, generator=rng)
        ddp = DistributedDataParallel(build())
        message = message_of(lambda: (ddp(real) - ddp(fake)).mean().backward())
        d = build()
        disc = paragan.Replica(d, sgd(d), world=world)
        with disc.turn():
            (d(real) - d(fake)).mean().backward()
        paragan.check_replicas(disc)
        return message, ddp.module[1].running_mean, d[1].running_mean

    (message, *own), (_, *other) = pool(2, job)
    assert not message or IN_PLACE in message
    assert not torch.equal(own[0], other[0])
    assert torch.equal(own[1], other[1])


def test_a_second_backward_pass_after_two_forward_passes_is_not_averaged(pool):
    """tunit#30 (a loss of D in several backward passes); Lightning#4953, when it was still an error."""

    def job(world):
        _, real = draw(world.rank)
        losses = [lambda d: d(real).mean(), lambda d: (d(real) - 1).square().mean()]
        ddp = DistributedDataParallel(Both().d)
        for loss in [loss(ddp) for loss in losses]:
            loss.backward()
        d = Both().d
        disc = paragan.Replica(d, sgd(d), world=world)
        with disc.turn(backwards=2):
            for loss in [loss(d) for loss in losses]:
                loss.backward()
        return gradient(ddp), weights(d)

    alone = Both().d
    _, real = draw_all(2)
    (alone(real).mean() + (alone(real) - 1).square().mean()).backward()
    sgd(alone).step()
    (own_gradient, own), (other_gradient, other) = pool(2, job)
    assert not torch.allclose(own_gradient, other_gradient, rtol=0.01)  # without a word
    assert torch.equal(own, other)
    torch.testing.assert_close(own, weights(alone), rtol=1e-6, atol=1e-7)


def test_accumulated_gradients_of_several_networks_are_exchanged_once(pool):
    """accelerate#668: `accumulate` suspends the exchange of one network, and others are exchanged in every pass."""
    passes = 4

    def count_messages(ddp, counts):
        def hook(state, bucket):
            counts.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        ddp.register_comm_hook(None, hook)
        return ddp

    def job(world):
        both, counts = Both(), {"g": [], "d": []}
        g, d = (count_messages(DistributedDataParallel(getattr(both, part)), counts[part]) for part in "gd")
        z, real = draw(world.rank)
        for i in range(passes):
            with g.no_sync() if i < passes - 1 else contextlib.nullcontext():
                (g(z).mean() + d(real).mean()).backward()
        replicas = {part: paragan.Replica(net, sgd(net), world=world) for part, net in (("g", both.g), ("d", both.d))}
        with mock.patch.object(turn_summary, "CHECKED_TURNS", 0):
            for replica, x in ((replicas["g"], z), (replicas["d"], real)):
                with replica.turn(backwards=passes):
                    for _ in range(passes):
                        replica.modules[0](x).mean().backward()
        messages = {part: replica.meter.messages for part, replica in replicas.items()}
        return {part: len(count) for part, count in counts.items()}, messages

    for of_ddp, ours in pool(2, job):
        assert of_ddp == {"g": 1, "d": passes}
        assert ours == {"g": ONE_ALL_REDUCE, "d": ONE_ALL_REDUCE}


# more than one of everything ----------------------------------------------------------------------------------------


def test_any_number_of_networks_with_optimizers_of_their_own(pool):
    """accelerate#2496 (DeepSpeed) and "Only one model is supported when using FSDP2"."""

    def step(nets, z, turn):
        for i, net in enumerate(nets):
            with turn(i):
                (net(z) - nets[i - 1](z)).square().mean().backward()

    def build():
        torch.manual_seed(0)
        return [nn.Linear(Z, X) for _ in range(4)]

    def job(world):
        nets = build()
        replicas = [paragan.Replica(net, sgd(net), world=world) for net in nets]
        step(nets, draw(world.rank)[0], lambda i: replicas[i].turn())
        paragan.check_replicas(*replicas)
        return weights(*nets)

    nets = build()

    @contextlib.contextmanager
    def turn(i):
        nn.ModuleList(nets).zero_grad()
        yield
        sgd(nets[i]).step()

    step(nets, draw_all(2)[0], turn)
    for result in pool(2, job):
        torch.testing.assert_close(result, weights(*nets), rtol=1e-6, atol=1e-7)


# ranks that do not do the same --------------------------------------------------------------------------------------


def test_a_rank_that_leaves_d_out_mixes_the_gradients_of_d_and_g(pool):
    """encodec-pytorch#30, EnCodec_Trainer#4: every rank draws, or decides by its own loss, whether D is trained."""

    def job(world):
        both = [DistributedDataParallel(nn.Linear(3, 1)) for _ in range(2)]
        net = both[world.rank]  # rank 0 trains the first, rank 1 goes on to the second
        (net(torch.full((1, 3), 1.0 + world.rank)) * 10**world.rank).sum().backward()
        return net.module.weight.grad

    for mixed in pool(2, job):
        torch.testing.assert_close(mixed, torch.full((1, 3), (1 + 20) / 2))  # without a word


@pytest.mark.parametrize("sizes", [(1, 1), (1, 500)])
def test_a_turn_that_a_rank_leaves_out_is_noticed_before_gradients_are_sent(pool, sizes):
    """encodec-pytorch#30 and EnCodec_Trainer#4 here."""

    def job(world):
        nets = [nn.Linear(3, size) for size in sizes]
        d, g = (paragan.Replica(net, sgd(net), world=world) for net in nets)
        own = (d, g)[world.rank]
        before = weights(*nets)
        refused = pytest.raises(paragan.UsageError, match="another rank plays the turn of another replica")
        with refused, own.turn():
            own.modules[0](torch.ones(1, 3)).mean().backward()
        return torch.equal(before, weights(*nets))

    assert pool(2, job) == [True, True]


def test_a_turn_that_is_left_out_later_is_noticed_before_the_step(pool):
    """encodec-pytorch#30, after the turns in which ranks compare at once where they are."""

    def job(world):
        nets = [nn.Linear(3, 1) for _ in range(2)]
        d, g = (paragan.Replica(net, sgd(net), world=world) for net in nets)
        own = (d, g)[world.rank]
        before = weights(*nets)
        is_noticed = pytest.raises(paragan.UsageError, match="another rank plays the turn of another replica")
        with mock.patch.object(turn_summary, "CHECKED_TURNS", 0), is_noticed, own.turn():
            own.modules[0](torch.ones(1, 3)).mean().backward()
        return torch.equal(before, weights(*nets))

    assert pool(2, job) == [True, True]


def test_a_rank_may_have_no_backward_pass_in_a_turn(pool):
    """encodec-pytorch#30, as it should be written: the turn is open on every rank."""

    def job(world):
        net = nn.Linear(3, 1)
        nn.init.zeros_(net.weight)
        with paragan.Replica(net, sgd(net), world=world).turn():
            if world.rank == 0:
                net(torch.ones(1, 3)).sum().backward()
        return net.weight.tolist()

    assert pool(2, job) == [[[pytest.approx(-0.1 / 2)] * 3]] * 2
