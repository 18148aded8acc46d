"""Optimistic Adam (Daskalakis, Ilyas, Syrgkanis, Zeng 2018) and extragradient (Gidel et al. 2019)."""

from __future__ import annotations

import pytest
from players import ADAM, SGD, Adam, Descent, JointGame, Optimistic, check

RULES = {"sgd": (SGD, Descent), "adam": (ADAM, Adam)}


def wrapped(wrapper: str, *settings: str) -> tuple[str, ...]:
    wrappers = [f"{p}.optimizer_wrapper={wrapper}" for p in "gd"]
    return ("strategy=sync", "strategy.order=simultaneous", *wrappers, *settings)


@pytest.mark.parametrize(("ranks", "rule", "a"), [(1, "adam", 1.0), (3, "adam", 0.5), (2, "sgd", 2.0), (4, "sgd", 1.0)])
def test_optimistic(pool, ranks, rule, a):
    optimizer, inner = RULES[rule]
    settings = wrapped("optimistic", *optimizer, f"g.extrapolation={a}", f"d.extrapolation={a}")
    game = JointGame(settings, ranks)
    w, step = game.start, Optimistic(inner(game.rates), a)
    for k in range(8):
        w = w - step(game.mean_gradient(w, k))
    check(pool, settings, 8, [w] * ranks)


@pytest.mark.parametrize(("ranks", "rounds", "rule"), [(1, 8, "adam"), (3, 7, "adam"), (2, 8, "sgd"), (4, 7, "sgd")])
def test_extragradient(pool, ranks, rounds, rule):
    """Take half an iteration a round: w_half = w - u(F(w)), then w <- w - u(F(w_half))."""
    optimizer, inner = RULES[rule]
    settings = wrapped("extragradient", *optimizer)
    game = JointGame(settings, ranks)
    w, step = game.start, inner(game.rates)
    for k in range(0, rounds, 2):
        half = w - step(game.mean_gradient(w, k))
        w = half if k + 1 == rounds else w - step(game.mean_gradient(half, k + 1))
    check(pool, settings, rounds, [w] * ranks)
