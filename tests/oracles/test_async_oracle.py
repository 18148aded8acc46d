"""Asynchronous G and D (Shi, Li & You, SoCC 2024): each player steps against the other as it was some rounds ago."""

from __future__ import annotations

import pytest
import torch
from players import ADAM, PLAIN, RATE_D, RATE_G, SGD, Adam, Descent, JointGame, Optimistic, check, split
from smooth_game import Vectors, play, relative_difference

EXTRAPOLATION = 2.0  # this strategy's default
RULES = {
    "sgd": ((*SGD, *PLAIN), Descent),
    "optimistic sgd": (SGD, lambda rate: Optimistic(Descent(rate), EXTRAPOLATION)),
    "optimistic adam": (ADAM, lambda rate: Optimistic(Adam(rate), EXTRAPOLATION)),
}


def rounds_against_old_opponents(game: JointGame, rule: str, rounds: int, fake_lags, critic_lags) -> torch.Tensor:
    """G steps against the D of critic_lag rounds ago, D on the reals of now and the fakes of fake_lag rounds ago."""
    w, step, ds, fakes = game.start, RULES[rule][1](game.rates), [], []
    for k in range(rounds):
        g, d = split(w)
        ds.append(d)
        fakes.append([game.fakes(g, i, k) for i in range(game.ranks)])
        old_d = ds[max(0, k - critic_lags[k % len(critic_lags)])]
        old_fakes = fakes[max(0, k - fake_lags[k % len(fake_lags)])]
        gradients = [torch.cat([game.g(g, old_d, i, k), game.d_on(old_fakes[i], d, i, k)]) for i in range(game.ranks)]
        w = w - step(sum(gradients) / game.ranks)
    return w


@pytest.mark.parametrize(
    ("ranks", "rule", "fake_lags", "critic_lags"),
    [
        (1, "sgd", [0], [0]),
        (1, "optimistic adam", [3], [0]),
        (2, "sgd", [0], [4]),
        (3, "optimistic sgd", [2], [3]),
        (4, "optimistic adam", [1, 0, 2], [0, 2]),
        (1, "sgd", [0, 2, 1], [3, 1]),
    ],
)
def test_every_rank_trains_both(pool, ranks, rule, fake_lags, critic_lags):
    lags = (f"strategy.fake_lags={fake_lags}", f"strategy.critic_lags={critic_lags}")
    settings = ("strategy=async", "strategy.split=none", *lags, *RULES[rule][0])
    game = JointGame(settings, ranks)
    check(pool, settings, 9, [rounds_against_old_opponents(game, rule, 9, fake_lags, critic_lags)] * ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_several_steps_of_d(pool, ranks):
    """G steps with D's first step; all of D's steps see the images of G's."""
    settings = ("strategy=async", "strategy.split=none", "d_steps=2", *RULES["sgd"][0])
    game, every = JointGame(settings, ranks), range(ranks)
    g, d = split(game.start)
    for k in range(0, 12, 2):
        fakes = [game.fakes(g, i, k) for i in every]
        g = g - RATE_G * sum(game.g(g, d, i, k) for i in every) / ranks
        for j in (k, k + 1):
            d = d - RATE_D * sum(game.d_on(fakes[i], d, i, j) for i in every) / ranks
    check(pool, settings, 6, [torch.cat([g, d])] * ranks)


@pytest.mark.parametrize(
    ("teams", "rule"),
    [("1:1", "sgd"), ("1:2", "optimistic adam"), ("2:1", "optimistic sgd"), ("1:3", "sgd")],
)
def test_teams(pool, teams, rule):
    """With max_lead_rounds=1 both teams are in the same round: as one rank without lags, and each has its player."""
    settings = ("strategy=async", f"strategy.split={teams}", "strategy.max_lead_rounds=1", *RULES[rule][0])
    g, d = split(rounds_against_old_opponents(JointGame(settings, 1), rule, 8, [0], [0]))
    of_g, of_d = map(int, teams.split(":"))
    actual = pool(of_g + of_d, lambda world: play(settings, 8, world))
    for a in actual[:of_g]:
        assert relative_difference(a, Vectors(g, a.d)) < 1e-12
    for a in actual[of_g:]:
        assert relative_difference(a, Vectors(a.g, d)) < 1e-12


@pytest.mark.parametrize(("teams", "every"), [("1:1", 2), ("2:2", 3)])
def test_snapshots_every_so_many_rounds(pool, teams, every):
    """D sends its parameters to G after every `every` rounds: until then G steps against the former D."""
    settings = ("strategy=async", f"strategy.split={teams}", f"strategy.snapshot_every={every}", *RULES["sgd"][0])
    ages = [k % every for k in range(8)]
    g, d = split(rounds_against_old_opponents(JointGame(settings, 1), "sgd", 8, [0], ages))
    of_g, of_d = map(int, teams.split(":"))
    actual = pool(of_g + of_d, lambda world: play(settings, 8, world))
    assert relative_difference(Vectors(actual[0].g, actual[-1].d), Vectors(g, d)) < 1e-12
