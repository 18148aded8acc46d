"""Decentralized training: every named algorithm against its pseudo-code with all ranks in one process, and the laws of
mixing on real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paragan.comm.compression.compressors import BF16, Exact, Int4, Int8, Sign
from paragan.comm.exchange import Blocking, Chain, EveryN, OptimisticMirrorDescent
from paragan.comm.flat_params import FlatParams
from paragan.comm.gossip import CompressedGossip, Gossip
from paragan.comm.topology import Complete, Matching, OnePeer, RandomRing, Ring, contraction
from paragan.comm.traffic import Meter
from paragan.optim.optimistic import optimistic
from paragan.plan.select.candidates import parse_strategy
from paragan.strategies.sync import make_gradient_exchange

SIZE = 96
RATE = 0.1


class Point(nn.Module):
    """Two parameters, so that there are two buckets; ranks have different initial values."""

    def __init__(self, rank):
        super().__init__()
        g = torch.Generator().manual_seed(100 + rank)
        self.a, self.b = (nn.Parameter(torch.randn(SIZE // 2, generator=g)) for _ in "ab")


def start(rank):
    return FlatParams.from_network(Point(rank), bucket_bytes=SIZE)


def slope(w, rank, step, n):
    """Return a gradient that is not linear and differs between ranks."""
    g = torch.Generator().manual_seed(1000 * rank + step)
    return torch.sin(3 * w) + 0.3 * torch.randn(n, generator=g)


def stepped(world, exchange, optimizer, steps):
    """Return a rank's parameters after some steps."""
    flat = start(world.rank)
    vector = nn.Parameter(flat.params)
    vector.grad = flat.grads
    move = optimizer([vector])
    for step in range(steps):
        with flat.exchanging(exchange, step):
            flat.grads.copy_(slope(flat.params, world.rank, step, len(flat.params)))
        flat.finish()
        move.step()
    return flat.params.clone()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=RATE)


def optimistic_adam(parameters):
    return optimistic(torch.optim.Adam(parameters, lr=RATE, betas=(0.5, 0.9)))


def starts(ranks):
    return torch.stack([start(rank).params.clone() for rank in range(ranks)])


def powers(topology, ranks, step, rounds):
    """Return W of a step: the product over its rounds."""
    product = np.eye(ranks)
    for turn in range(step * rounds, (step + 1) * rounds):
        period = topology.period(ranks)
        product = topology.matrix(ranks, turn % period if period else turn) @ product
    return torch.from_numpy(product).float()


def check(actual, expected, atol=1e-5):
    for rank, params in enumerate(actual):
        torch.testing.assert_close(params, expected[rank], rtol=1e-4, atol=atol)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rounds", [1, 3])
def test_dposg_is_the_papers_pseudo_code(pool, ranks, rounds):
    """mix = W^t X;  Z = mix - eta g(Z before);  X = mix - eta g(Z), a gradient an iteration."""

    def job(world):
        exchange = Chain(Blocking(Gossip(Ring(), world.all_ranks, rounds)), OptimisticMirrorDescent(lambda: RATE))
        return stepped(world, exchange, sgd, 6)

    x = powers(Ring(), ranks, 0, rounds) @ starts(ranks)  # the first round mixes, and takes the gradient at the start
    before = torch.stack([slope(x[i], i, 0, x.shape[1]) for i in range(ranks)])
    for step in range(1, 6):
        mix = powers(Ring(), ranks, step, rounds) @ x
        z = mix - RATE * before
        before = torch.stack([slope(z[i], i, step, x.shape[1]) for i in range(ranks)])
        x = mix - RATE * before
    check(pool(ranks, job), x)


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("topology", [Ring(), RandomRing(), OnePeer(), Matching()], ids=lambda t: t.name)
def test_dp_oadam_is_the_papers_pseudo_code(pool, ranks, topology):
    """theta_i <- sum_j W_ij theta_j - 2 lr u + lr (u before); u from gradients at theta_i, with local moments."""
    beta1, beta2, eps, steps = 0.5, 0.9, 1e-8, 7
    results = pool(ranks, lambda world: stepped(world, Gossip(topology, world.all_ranks), optimistic_adam, steps))
    x = starts(ranks)
    m, v, before = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        g = torch.stack([slope(x[i], i, step, x.shape[1]) for i in range(ranks)])
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1 ** (step + 1))) / ((v / (1 - beta2 ** (step + 1))).sqrt() + eps)
        x = powers(topology, ranks, step, 1) @ x - 2 * RATE * u + RATE * before
        before = u
    check(results, x)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_cp_oadam_is_the_papers_pseudo_code(pool, ranks):
    """theta <- theta - 2 lr u + lr (u before), u from the mean gradient of all ranks at theta."""
    beta1, beta2, eps, steps = 0.5, 0.9, 1e-8, 7

    def job(world):
        flat = start(0)
        vector = nn.Parameter(flat.params)
        vector.grad = flat.grads
        move = optimistic_adam([vector])
        exchange = make_gradient_exchange(parse_strategy("CP-OAdam").wire, world.all_ranks)
        for step in range(steps):
            with flat.exchanging(exchange, step):
                flat.grads.copy_(slope(flat.params, world.rank, step, len(flat.params)) / ranks)
            flat.finish()
            move.step()
        return flat.params.clone()

    x = start(0).params.clone()
    m, v, before = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    for step in range(steps):
        g = torch.stack([slope(x, i, step, len(x)) for i in range(ranks)]).mean(0)
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1 ** (step + 1))) / ((v / (1 - beta2 ** (step + 1))).sqrt() + eps)
        x, before = x - 2 * RATE * u + RATE * before, u
    check(pool(ranks, job), [x] * ranks)


@pytest.mark.slow(after=6)
@pytest.mark.parametrize("wire", [Exact(), BF16(), Int8(), Sign()], ids=lambda w: w.name)
@pytest.mark.parametrize("topology", [Ring(), OnePeer(), RandomRing()], ids=lambda t: t.name)
def test_compressed_gossip_is_choco_with_a_copy_on_every_link(pool, wire, topology):
    ranks, steps, rate = 4, 6, 0.5

    def job(world):
        return stepped(world, CompressedGossip(topology, world.all_ranks, wire, consensus_rate=rate), sgd, steps)

    def coded(x):
        data, out = torch.zeros(wire.nbytes(len(x)), dtype=torch.uint8), torch.empty_like(x)
        wire.encode(x.contiguous(), data, 0)
        wire.decode(data, out)
        return out

    x = starts(ranks)
    copies = torch.zeros(ranks, ranks, x.shape[1])  # [i, j]: j's copy of i
    bucket = x.shape[1] // 2
    for step in range(steps):
        g = torch.stack([slope(x[i], i, step, x.shape[1]) for i in range(ranks)])
        w = powers(topology, ranks, step, 1)
        links = [(i, j) for i in range(ranks) for j in range(ranks) if i != j and w[j, i]]
        for i, j in links:
            copies[i, j] += torch.cat([coded(part) for part in (x[i] - copies[i, j]).split(bucket)])
        drift = torch.zeros_like(x)
        for i, j in links:  # message from i to j
            drift[j] += w[j, i] * copies[i, j]
            drift[i] -= w[j, i] * copies[i, j]
        x = x + rate * drift - RATE * g
    check(pool(ranks, job), x, atol=0.02 if wire.name == "int8" else 1e-5)  # a tie may fall either way


def mixed(pool, ranks, exchange, steps):
    """Return the parameters [steps + 1, ranks, n] under mixing only."""

    def job(world):
        flat = start(world.rank)
        states = []
        states.append(flat.params.clone())
        for step in range(steps):
            with flat.exchanging(exchange(world.all_ranks), step):
                pass
            flat.finish()
            states.append(flat.params.clone())
        return states

    return torch.stack([torch.stack(states) for states in pool(ranks, job)]).transpose(0, 1).double()


def distances(states):
    return (states - states.mean(1, keepdim=True)).flatten(1).norm(dim=1)


@pytest.mark.parametrize(
    ("exchange", "left"),
    [
        (lambda group: Gossip(Ring(), group), contraction(Ring(), 4)),
        (lambda group: Gossip(Ring(), group, rounds=2), contraction(Ring(), 4) ** 2),
        (lambda group: Gossip(Complete(), group), 1e-6),
        (lambda group: CompressedGossip(Ring(), group, Int8()), 0.5),
        (lambda group: CompressedGossip(Ring(), group, Int4()), 0.7),
        (lambda group: CompressedGossip(OnePeer(), group, Int8()), 0.75),
        (lambda group: CompressedGossip(Ring(), group, Sign(), consensus_rate=0.3), 0.97),
    ],
    ids=["ring", "two rounds", "complete", "ring int8", "ring int4", "one-peer int8", "ring sign"],
)
def test_mixing_preserves_the_mean_and_contracts_to_it(pool, exchange, left):
    states = mixed(pool, 4, exchange, 12)
    torch.testing.assert_close(states.mean(1), states[0].mean(0).expand(13, -1), rtol=1e-5, atol=1e-5)
    d = distances(states)
    assert d[12] <= max(d[0] * (left * 1.05) ** 12, 2e-6 * states[0].norm())


def test_one_peer_is_exact_after_log2_steps(pool):
    d = distances(mixed(pool, 8, lambda group: Gossip(OnePeer(), group), 3))
    assert d[2] > 0.1
    assert d[3] < 1e-5


def test_local_steps_mix_at_the_end_of_each_period(pool):
    d = distances(mixed(pool, 4, lambda group: EveryN(Gossip(OnePeer(), group), 3), 6))
    assert d[0] == d[1] == d[2] > d[3] == d[4] == d[5] > d[6]
    assert d[6] < 1e-5  # the topology counts periods: two reach the mean of four ranks


def test_counted_bytes_equal_predicted_bytes(pool):
    def job(world):
        results = []
        for make in (
            lambda group: Gossip(Ring(), group, 2),
            lambda group: Gossip(OnePeer(), group),
            lambda group: CompressedGossip(OnePeer(), group, Int4()),
        ):
            meter = Meter()
            exchange = make(world.all_ranks.with_meter(meter))
            flat = start(world.rank)
            for step in range(3):
                with flat.exchanging(exchange, step):
                    pass
                flat.finish()
            traffic = flat.traffic(exchange)
            results.append((meter.sent_bytes, meter.messages, 3 * traffic.sent_bytes, 3 * traffic.messages))
        return results

    for rank in pool(4, job):
        for sent, messages, predicted, predicted_messages in rank:
            assert (sent, messages) == (predicted, predicted_messages)
            assert sent > 0


@pytest.mark.slow
def test_dposg_converges_where_gossip_descent_diverges(pool):
    """min_x max_y of a bilinear game that is distributed over the ranks: no rank can find its solution by itself."""

    def play(world, extrapolate):
        size, rank = world.size, world.rank
        a = torch.linspace(0.5, 1.0, SIZE) + 0.4 * torch.cos(torch.arange(SIZE) + 2 * torch.pi * rank / size)
        x, y = start(0), start(1)
        mixing = Gossip(Ring(), world.all_ranks)
        exchange = Chain(Blocking(mixing), OptimisticMirrorDescent(lambda: 0.2)) if extrapolate else mixing
        for step in range(800):
            with x.exchanging(exchange, step), y.exchanging(exchange, step):
                x.grads.copy_(a * y.params)
                y.grads.copy_(-a * x.params)
            for player in (x, y):
                player.finish()
                player.params.sub_(player.grads, alpha=0.2)
        return float(torch.hypot(x.params.norm(), y.params.norm()))

    initial_radius = float(torch.hypot(start(0).params.norm(), start(1).params.norm()))
    assert max(pool(4, lambda world: play(world, True))) < 1e-3 * initial_radius
    assert min(pool(4, lambda world: play(world, False))) > 10 * initial_radius
