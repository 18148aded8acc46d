"""Local SGDA (Deng & Mahdavi 2021), and two other forms of agreeing less often: `strategy.sync_mode`."""

from __future__ import annotations

import pytest
import torch
from players import ADAM, RATE_D, RATE_G, SGD, UNEQUAL, Adam, Descent, JointGame, check, split

RULES = {"sgd": (SGD, Descent), "adam": (ADAM, Adam)}


def mean(values):
    return sum(values) / len(values)


def local(optimizer, order, period, mode="parameters", d_steps=1):
    names = {"order": order, "sync_period": period, "sync_mode": mode}
    return ("strategy=sync", *(f"strategy.{k}={v}" for k, v in names.items()), f"d_steps={d_steps}", *optimizer)


@pytest.mark.parametrize(("ranks", "period", "rule"), [(1, 2, "sgd"), (2, 2, "adam"), (3, 3, "sgd"), (4, 4, "adam")])
def test_simultaneous_local_sgda(pool, ranks, period, rule):
    optimizer, inner = RULES[rule]
    settings = local(optimizer, "simultaneous", period)
    game = JointGame(settings, ranks)
    w, steps = [game.start] * ranks, [inner(game.rates) for _ in range(ranks)]
    for k in range(11):
        w = [x - steps[i](game.gradient(x, i, k)) for i, x in enumerate(w)]
        if (k + 1) % period == 0:
            w = [mean(w)] * ranks
    check(pool, settings, 11, w)


def test_unequal_ranks(pool):
    """The mean of parameters weighs a rank by its part of the batch."""
    settings = (*local(SGD, "simultaneous", 2), *UNEQUAL)
    game = JointGame(settings, 3)
    w = [game.start] * 3
    for k in range(7):
        w = [x - game.rates * game.gradient(x, i, k) for i, x in enumerate(w)]
        if k % 2:
            w = [sum(share * x for share, x in zip(game.shares(), w))] * 3
    check(pool, settings, 7, w)


@pytest.mark.parametrize(
    ("ranks", "period", "d_steps", "rule"), [(2, 2, 1, "sgd"), (3, 3, 1, "adam"), (2, 4, 2, "adam"), (3, 2, 2, "sgd")]
)
def test_alternating_local_sgda(pool, ranks, period, d_steps, rule):
    """D steps, then G against the new D; both players are averaged after each period of rounds."""
    optimizer, inner = RULES[rule]
    settings = local(optimizer, "alternating", period, d_steps=d_steps)
    game = JointGame(settings, ranks)
    g, d = ([v] * ranks for v in split(game.start))
    step_g, step_d = ([inner(rate) for _ in range(ranks)] for rate in (RATE_G, RATE_D))
    for k in range(7):
        for i in range(ranks):
            for j in range(k * d_steps, (k + 1) * d_steps):
                d[i] = d[i] - step_d[i](game.d(g[i], d[i], i, j))
            g[i] = g[i] - step_g[i](game.g(g[i], d[i], i, j))
        if (k + 1) % period == 0:
            g, d = [mean(g)] * ranks, [mean(d)] * ranks
    check(pool, settings, 7, [torch.cat(x) for x in zip(g, d)])


@pytest.mark.parametrize(("ranks", "period", "rule"), [(1, 3, "adam"), (2, 2, "sgd"), (3, 3, "adam"), (4, 4, "sgd")])
def test_gradients_agree_in_the_last_round(pool, ranks, period, rule):
    """Own steps; in the last round of a period all apply the mean gradient. Parameters are never averaged."""
    optimizer, inner = RULES[rule]
    settings = local(optimizer, "simultaneous", period, "gradients")
    game = JointGame(settings, ranks)
    w, steps = [game.start] * ranks, [inner(game.rates) for _ in range(ranks)]
    for k in range(9):
        gradients = [game.gradient(x, i, k) for i, x in enumerate(w)]
        if (k + 1) % period == 0:
            gradients = [mean(gradients)] * ranks
        w = [x - step(f) for x, step, f in zip(w, steps, gradients)]
    check(pool, settings, 9, w)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("d_steps", [1, 2])
def test_gradients_agree_in_alternating_order(pool, ranks, d_steps):
    """In the last round of a period those of all turns of D agree, then those of G."""
    settings = local(SGD, "alternating", 2, "gradients", d_steps)
    game = JointGame(settings, ranks)
    g, d = ([v] * ranks for v in split(game.start))
    for k in range(7):
        agree = (lambda f: [mean(f)] * ranks) if k % 2 else (lambda f: f)
        for j in range(k * d_steps, (k + 1) * d_steps):
            gradients = agree([game.d(g[i], d[i], i, j) for i in range(ranks)])
            d = [x - RATE_D * f for x, f in zip(d, gradients)]
        gradients = agree([game.g(g[i], d[i], i, j) for i in range(ranks)])
        g = [x - RATE_G * f for x, f in zip(g, gradients)]
    check(pool, settings, 7, [torch.cat(x) for x in zip(g, d)])


@pytest.mark.parametrize(("ranks", "period", "rule"), [(1, 3, "sgd"), (2, 2, "adam"), (3, 4, "sgd"), (4, 3, "adam")])
def test_accumulated_gradients(pool, ranks, period, rule):
    """Take one step at the end of a period, with the mean gradient over its rounds and ranks: n ranks equal one."""
    optimizer, inner = RULES[rule]
    settings = local(optimizer, "simultaneous", period, "accumulate")
    game = JointGame(settings, ranks)
    w, step = game.start, inner(game.rates)
    for first in range(0, 10 - period + 1, period):
        w = w - step(mean([game.mean_gradient(w, k) for k in range(first, first + period)]))
    check(pool, settings, 10, [w] * ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_accumulated_gradients_in_alternating_order(pool, ranks):
    """At a period's end D steps first; G's last gradient of the period is already against the new D."""
    settings = local(SGD, "alternating", 2, "accumulate")
    game = JointGame(settings, ranks)
    (g, d), every = split(game.start), range(ranks)
    for k in range(0, 6, 2):
        new_d = d - RATE_D * mean([game.d(g, d, i, j) for i in every for j in (k, k + 1)])
        g = g - RATE_G * mean([game.g(g, d, i, k) for i in every] + [game.g(g, new_d, i, k + 1) for i in every])
        d = new_d
    check(pool, settings, 7, [torch.cat([g, d])] * ranks)
