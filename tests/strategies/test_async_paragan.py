"""G and D against what the other was a moment ago: the emulation, in one process or on several ranks."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import relu

import tiny_run
from paragan.core.rng import Draw
from paragan.game.replay_policy import Newest, Replay, Uniform
from paragan.train.loop import play_round

LAGS = {
    "one device": ((0,), (0,)),
    "images of the round before": ((1,), (0,)),
    "both lag": ((2,), (3,)),
    "patterns": ((1, 3, 2, 0), (0, 4)),
}


def plain_loop(run, rounds, fake_lags, critic_lags):
    """All that ever was made or was D is kept; everybody moves from the same point."""
    s = tiny_run.session(run)  # for its networks, lanes and optimizers; its strategy is not asked
    g, d, labels = s.game.g, s.game.d, s.game.labels
    made, critics = [], []

    def fake(hand):
        y = hand.draw.choice("label/G", labels)
        return g.net(hand.draw.normal("latent/G", 8), y), y

    for step in range(rounds):
        (hand,) = s.lanes.next()
        for player in (d, g):
            player.prepare((step + 1) * run.round)
            player.flat.grads.zero_()
        critics.append(copy.deepcopy(d.net))
        critic = critics[max(step - critic_lags[step % len(critic_lags)], 0)].requires_grad_(False)
        with g.moving(), g.counting():
            x, y = fake(hand)
            (-critic(x, y).mean()).backward()
        g.share_moments(s.world.everyone)
        made.append((x.detach(), y))
        lag = fake_lags[step % len(fake_lags)]
        with torch.no_grad():
            x, y = made[max(step - lag, 0)]
        with d.moving():
            (relu(1 - d.net(hand.images, hand.labels)) + relu(1 + d.net(x, y))).mean().backward()
        for player in (d, g):
            player.move((step + 1) * run.round, run.round)
        for _ in range(run.d_steps - 1):
            (hand,) = s.lanes.next()
            d.prepare((step + 1) * run.round)
            d.flat.grads.zero_()
            with d.moving():
                (relu(1 - d.net(hand.images, hand.labels)) + relu(1 + d.net(x, y))).mean().backward()
            d.move((step + 1) * run.round, run.round)
    return tiny_run.state(s)


def asked(fake_lags, critic_lags):
    return (
        "strategy=async",
        f"strategy.fake_lags={list(fake_lags)}",
        f"strategy.critic_lags={list(critic_lags)}",
    )


@pytest.mark.parametrize("d_steps", [1, 3])
@pytest.mark.parametrize(("fake_lags", "critic_lags"), LAGS.values(), ids=LAGS)
def test_it_equals_a_plain_loop_with_the_same_lags(fake_lags, critic_lags, d_steps):
    run = tiny_run.run(*asked(fake_lags, critic_lags), "nets.spectral=false", f"d_steps={d_steps}")
    assert tiny_run.same(tiny_run.play(run, 9), plain_loop(run, 9, fake_lags, critic_lags))


def test_one_forward_of_g_less_a_round():
    s = tiny_run.session(tiny_run.run("strategy=async", "d_steps=3"))
    calls = []
    s.game.g.net.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    for _ in range(3):
        calls.clear()
        play_round(s)
        assert calls == [True]


def test_what_is_kept_is_bounded():
    s = tiny_run.session(tiny_run.run("strategy=async", "strategy.fake_lags=[3,1]", "strategy.buffer=uniform"))
    for _ in range(20):
        play_round(s)
    fakes, critic = s.role.past
    assert sorted(fakes.rounds) == list(range(13, 20))  # 3 back, and 4 of them
    assert not critic.versions


def hand(n=1000):
    return Draw(0, 0, (0,), n)


def test_policies():
    assert Newest().ages(hand(), 3) is None
    uniform = np.bincount(Uniform(last=4).ages(hand(), 4))
    assert len(uniform) == 4
    assert (abs(uniform - 250) < 60).all()
    replay = np.bincount(Replay(fraction=0.25, last=8).ages(hand(), 5))
    assert abs(replay[0] - 750) < 60
    assert (abs(replay[1:] - 62) < 40).all()
    assert Uniform().ages(hand(), 1) is None
    assert Replay().ages(hand(), 1) is None


def test_replayed_images_keep_their_labels():
    """An image and its label stay together; what is drawn is what G made."""
    s = tiny_run.session(tiny_run.run("strategy=async", "strategy.buffer=uniform", "strategy.buffer.last=3"))
    for _ in range(5):
        play_round(s)
    fakes = s.role.past[0]
    drawn = fakes(s.lanes.hands[0], 4)
    lanes = s.lanes.hands[0].draw.lanes
    rounds = [fakes.rounds[step][lanes] for step in (4, 3, 2)]
    for i, (image, label) in enumerate(zip(drawn.images, drawn.labels)):
        assert any(torch.equal(image, made.images[i]) and label == made.labels[i] for made in rounds)
    assert not torch.equal(drawn.images, rounds[0].images)


def test_a_checkpoint_has_what_was_made_for_any_number_of_ranks(pool, tmp_path):
    """Three rounds on two ranks, then three on one, equal six on one; lags reach behind the checkpoint."""
    run = tiny_run.run(*asked((3, 1), (2,)), "strategy.buffer=replay", "strategy.buffer.fraction=0.9", lanes=4)
    saved = pool(2, lambda world: tiny_run.saved(run, 3, world, tmp_path)[0])[0]
    s = tiny_run.session(run, start=saved)
    assert set(s.role.past[0].rounds) == {0, 1, 2}
    for _ in range(3):
        play_round(s)
    whole = tiny_run.play(dataclasses.replace(run), 6)
    assert tiny_run.distance(tiny_run.state(s), whole, "G/") < 2e-4
    assert tiny_run.distance(tiny_run.state(s), whole, "D/") < 2e-4
