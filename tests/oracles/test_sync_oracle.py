"""Synchronous training and local SGDA, from their papers."""

from __future__ import annotations

import pytest
from smooth_game import Gradients, Vectors, play, relative_difference, start

RATE = 0.05
SGD = (*(f"{p}.optimizer=sgd" for p in "gd"), *(f"{p}.optimizer.lr={RATE}" for p in "gd"))
SIMULTANEOUS = ("strategy=sync", "strategy.order=simultaneous", *SGD)


def mean(values):
    return sum(values) / len(values)


@pytest.mark.parametrize("ranks", [1, 3])
def test_simultaneous_gradient_descent(pool, ranks):
    gradients = Gradients(SIMULTANEOUS, ranks)
    g, d = start()
    for k in range(8):
        g_grad = mean([gradients.g(g, d, i, k) for i in range(ranks)])
        d_grad = mean([gradients.d(g, d, i, k) for i in range(ranks)])
        g, d = g - RATE * g_grad, d - RATE * d_grad
    for actual in pool(ranks, lambda world: play(SIMULTANEOUS, 8, world)):
        assert relative_difference(actual, Vectors(g, d)) < 1e-12
