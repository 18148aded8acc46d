"""DPOSG and its practical forms (Liu et al., NeurIPS 2020): algorithm 1, DP-OAdam, Rand-DP-OAdam, CP-OAdam."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
from players import ADAM, RATE_D, RATE_G, SGD, UNEQUAL, Adam, JointGame, Optimistic, check, split
from torch import Tensor

from paragan.comm.topology import Matching, OnePeer, RandomRing

FALLING = ("g.schedule=linear", "d.schedule=linear", "kimg=0.288")  # to 0 in 12 rounds of 24 images


def cycle(n: int, shifts: dict[int, float]) -> Tensor:
    """Return the matrix by which rank i receives from rank i - shift."""
    eye = torch.eye(n, dtype=torch.double)
    return sum(weight * eye.roll(-shift, 1) for shift, weight in shifts.items())


def star(n: int) -> Tensor:
    """Return Metropolis weights: all links are as heavy as rank 0 has neighbors allow, 1 / n."""
    w = torch.eye(n, dtype=torch.double) * (1 - 1 / n)
    w[0, :] = w[:, 0] = 1 / n
    return w


def program_matrices(topology):
    """Return the matrices of a graph that the papers leave open, from the program."""
    return lambda n, step: torch.as_tensor(topology.matrix(n, step), dtype=torch.double)


GRAPHS = {  # the matrix W of n ranks at a step
    "ring": lambda n, step: cycle(n, {0: 1 / 3, 1: 1 / 3, -1: 1 / 3}) if n > 2 else cycle(n, {0: 1 / 2, 1: 1 / 2}),
    "complete": lambda n, step: torch.full((n, n), 1 / n, dtype=torch.double),
    "star": lambda n, step: star(n),
    "torus": lambda n, step: cycle(n, {0: 1 / 3, 1: 1 / 3, -1: 1 / 3}),  # 2 x 2 is a square
    "hypercube": lambda n, step: cycle(4, {0: 1 / 3, 1: 1 / 3, -1: 1 / 3})[[0, 1, 3, 2]][:, [0, 1, 3, 2]],
    "exponential": lambda n, step: cycle(n, {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}),
    "one-peer": program_matrices(OnePeer()),
    "matching": program_matrices(Matching()),
    "random-ring": program_matrices(RandomRing()),
}


def mixing(graph: str, n: int, iteration: int, rounds: int = 1) -> Tensor:
    """Return W^t, or the product of an iteration's t matrices."""
    every = [GRAPHS[graph](n, iteration * rounds + r) for r in range(rounds)]
    return reduce(lambda product, w: w @ product, every)


@pytest.mark.slow(after=5)
@pytest.mark.parametrize(
    ("graph", "n", "rounds", "more"),
    [
        ("ring", 1, 1, ()),
        ("ring", 3, 1, UNEQUAL),
        ("ring", 4, 3, ()),
        ("one-peer", 4, 1, ()),
        ("ring", 3, 1, FALLING),
        ("ring", 2, 1, ()),
        ("complete", 3, 1, ()),
        ("torus", 4, 2, ()),
        ("exponential", 4, 2, ()),
        ("star", 3, 2, ()),
        ("hypercube", 4, 1, ()),
        ("matching", 4, 2, ()),
        ("random-ring", 4, 3, ()),
    ],
)
def test_dposg(pool, graph, n, rounds, more):
    """Z_k = X_{k-1} W^t - eta F(Z_{k-1}; eps_{k-1}),  X_k = X_{k-1} W^t - eta F(Z_k; eps_k),  Z_0 = X_0."""
    settings = ("strategy=DPOSG", f"strategy.topology={graph}", f"strategy.rounds={rounds}", *SGD, *more)
    game, ranks = JointGame(settings, n), range(n)
    x = torch.stack([game.start] * n)
    before = torch.stack([game.gradient(x[i], i, 0) for i in ranks])  # the first round only measures this
    for k in range(1, 8):
        eta = game.rates * (1 - (k + 1) / 12 if more == FALLING else 1)
        mixed = mixing(graph, n, k, rounds) @ x
        z = mixed - eta * before
        before = torch.stack([game.gradient(z[i], i, k) for i in ranks])
        x = mixed - eta * before
    check(pool, settings, 8, x)


def dp_oadam(game: JointGame, graph: str, rounds: int, iterations: int, period: int = 1) -> Tensor:
    """x_i <- sum_j [W^t]_ij x_j - 2 u_k + u_{k-1}; u_k is Adam's direction on the gradient at x_i.

    Ranks mix in the last iteration of each period only.
    """
    n = game.ranks
    x, steps = torch.stack([game.start] * n), [Optimistic(Adam(game.rates)) for _ in range(n)]
    for k in range(iterations):
        u = torch.stack([steps[i](game.gradient(x[i], i, k)) for i in range(n)])
        if (k + 1) % period == 0:
            x = mixing(graph, n, k // period, rounds) @ x
        x = x - u
    return x


@pytest.mark.parametrize(
    ("graph", "n", "rounds", "more"),
    [
        ("ring", 1, 1, ()),
        ("ring", 4, 1, ()),
        ("ring", 3, 2, UNEQUAL),
        ("complete", 2, 1, ()),
        ("exponential", 3, 1, UNEQUAL),
    ],
)
def test_dp_oadam(pool, graph, n, rounds, more):
    settings = ("strategy=DP-OAdam", f"strategy.topology={graph}", f"strategy.rounds={rounds}", *ADAM, *more)
    check(pool, settings, 8, dp_oadam(JointGame(settings, n), graph, rounds, 8))


@pytest.mark.parametrize(("graph", "n", "period"), [("ring", 4, 3), ("matching", 4, 2), ("one-peer", 3, 4)])
def test_gossip_every_so_many_steps(pool, graph, n, period):
    settings = ("strategy=gossip", f"strategy.topology={graph}", f"strategy.sync_period={period}", *ADAM)
    check(pool, settings, 10, dp_oadam(JointGame(settings, n), graph, 1, 10, period))


@pytest.mark.parametrize(("n", "rounds", "more"), [(2, 1, ()), (3, 1, UNEQUAL), (4, 2, ())])
def test_rand_dp_oadam(pool, n, rounds, more):
    settings = ("strategy=Rand-DP-OAdam", f"strategy.rounds={rounds}", *ADAM, *more)
    check(pool, settings, 8, dp_oadam(JointGame(settings, n), "random-ring", rounds, 8))


@pytest.mark.parametrize(("order", "d_steps"), [("alternating", 1), ("alternating", 2), ("simultaneous", 2)])
def test_several_steps_of_d(pool, order, d_steps):
    """D mixes before each of its steps, G before its own: against the new D, or against the D of D's last step."""
    n, w = 3, mixing("ring", 3, 0)
    settings = ("strategy=DP-OAdam", "strategy.topology=ring", f"strategy.order={order}", f"d_steps={d_steps}", *ADAM)
    game, ranks = JointGame(settings, n), range(n)
    g, d = (torch.stack([v] * n) for v in split(game.start))
    steps_g, steps_d = ([Optimistic(Adam(rate)) for _ in ranks] for rate in (RATE_G, RATE_D))
    for k in range(7):
        for j in range(k * d_steps, (k + 1) * d_steps):
            before = d
            d = w @ d - torch.stack([steps_d[i](game.d(g[i], d[i], i, j)) for i in ranks])
        opponents = d if order == "alternating" else before
        g = w @ g - torch.stack([steps_g[i](game.g(g[i], opponents[i], i, j)) for i in ranks])
    check(pool, settings, 7, [torch.cat(x) for x in zip(g, d)])


@pytest.mark.parametrize(("n", "more"), [(1, ()), (3, UNEQUAL), (4, ())])
def test_cp_oadam(pool, n, more):
    """The centralized baseline: x <- x - 2 u_k + u_{k-1}, u_k is Adam's direction on the mean gradient."""
    settings = ("strategy=CP-OAdam", *ADAM, *more)
    game = JointGame(settings, n)
    x, step = game.start, Optimistic(Adam(game.rates))
    for k in range(8):
        x = x - step(game.mean_gradient(x, k))
    check(pool, settings, 8, [x] * n)
