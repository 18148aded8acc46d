"""Training of G and D against earlier states of each other, emulated in one process or on several ranks."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import relu

import tiny_run
from paragan.core.rng import LaneRng
from paragan.game.replay_policy import FractionalReplay, Latest, UniformReplay
from paragan.train.loop import play_round

LAGS = {
    "one device": ((0,), (0,)),
    "images of the round before": ((1,), (0,)),
    "both lag": ((2,), (3,)),
    "patterns": ((1, 3, 2, 0), (0, 4)),
}


def plain_loop(run, rounds, fake_lags, critic_lags):
    """Train in plain PyTorch, keeping all fakes and critics; both players step from the same point."""
    s = tiny_run.make_session(run)  # for its networks, lanes and optimizers; its strategy is not used
    g, d, labels = s.game.g, s.game.d, s.game.labels
    fakes, critics = [], []

    def fake(batch):
        y = batch.rng.choice("label/G", labels)
        return g.net(batch.rng.normal("latent/G", 8), y), y

    for step in range(rounds):
        (batch,) = s.lanes.next_micro_batches()
        for player in (d, g):
            player.prepare_step((step + 1) * run.round_images)
            player.flat.grads.zero_()
        critics.append(copy.deepcopy(d.net))
        critic = critics[max(step - critic_lags[step % len(critic_lags)], 0)].requires_grad_(False)
        with g.requiring_grad(), g.tracking_moments():
            x, y = fake(batch)
            (-critic(x, y).mean()).backward()
        g.all_reduce_moments(s.world.all_ranks)
        fakes.append((x.detach(), y))
        lag = fake_lags[step % len(fake_lags)]
        with torch.no_grad():
            x, y = fakes[max(step - lag, 0)]
        with d.requiring_grad():
            (relu(1 - d.net(batch.images, batch.labels)) + relu(1 + d.net(x, y))).mean().backward()
        for player in (d, g):
            player.step((step + 1) * run.round_images, run.round_images)
        for _ in range(run.d_steps - 1):
            (batch,) = s.lanes.next_micro_batches()
            d.prepare_step((step + 1) * run.round_images)
            d.flat.grads.zero_()
            with d.requiring_grad():
                (relu(1 - d.net(batch.images, batch.labels)) + relu(1 + d.net(x, y))).mean().backward()
            d.step((step + 1) * run.round_images, run.round_images)
    return tiny_run.session_state(s)


def lag_settings(fake_lags, critic_lags):
    return (
        "strategy=async",
        f"strategy.fake_lags={list(fake_lags)}",
        f"strategy.critic_lags={list(critic_lags)}",
    )


@pytest.mark.parametrize("d_steps", [1, 3])
@pytest.mark.parametrize(("fake_lags", "critic_lags"), LAGS.values(), ids=LAGS)
def test_async_equals_a_plain_loop_with_the_same_lags(fake_lags, critic_lags, d_steps):
    run = tiny_run.make_run(*lag_settings(fake_lags, critic_lags), "nets.spectral=false", f"d_steps={d_steps}")
    assert tiny_run.is_equal(tiny_run.play_rounds(run, 9), plain_loop(run, 9, fake_lags, critic_lags))


def test_g_runs_one_forward_per_round():
    s = tiny_run.make_session(tiny_run.make_run("strategy=async", "d_steps=3"))
    calls = []
    s.game.g.net.register_forward_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    for _ in range(3):
        calls.clear()
        play_round(s)
        assert calls == [True]


def test_replay_buffer_is_bounded():
    s = tiny_run.make_session(
        tiny_run.make_run("strategy=async", "strategy.fake_lags=[3,1]", "strategy.replay_policy=uniform")
    )
    for _ in range(20):
        play_round(s)
    fakes, critic = s.role.replay_state
    assert sorted(fakes.rounds) == list(range(13, 20))  # 3 back, and 4 of them
    assert not critic.versions


def single_lane_rng(n=1000):
    return LaneRng(0, 0, (0,), n)


def test_replay_policies_sample_the_expected_ages():
    assert Latest().sample_ages(single_lane_rng(), 3) is None
    uniform = np.bincount(UniformReplay(window=4).sample_ages(single_lane_rng(), 4))
    assert len(uniform) == 4
    assert (abs(uniform - 250) < 60).all()
    replay = np.bincount(FractionalReplay(fraction=0.25, window=8).sample_ages(single_lane_rng(), 5))
    assert abs(replay[0] - 750) < 60
    assert (abs(replay[1:] - 62) < 40).all()
    assert UniformReplay().sample_ages(single_lane_rng(), 1) is None
    assert FractionalReplay().sample_ages(single_lane_rng(), 1) is None


def test_replayed_images_match_their_labels():
    """Every sampled image is one of G's, with its label."""
    s = tiny_run.make_session(
        tiny_run.make_run("strategy=async", "strategy.replay_policy=uniform", "strategy.replay_policy.window=3")
    )
    for _ in range(5):
        play_round(s)
    fakes = s.role.replay_state[0]
    sample = fakes(s.lanes.micro_batches[0], 4)
    lanes = s.lanes.micro_batches[0].rng.lanes
    rounds = [fakes.rounds[step][lanes] for step in (4, 3, 2)]
    for i, (image, label) in enumerate(zip(sample.images, sample.labels)):
        assert any(torch.equal(image, generated.images[i]) and label == generated.labels[i] for generated in rounds)
    assert not torch.equal(sample.images, rounds[0].images)


def test_checkpoint_restores_the_replay_buffer_on_any_number_of_ranks(pool, tmp_path):
    """Three rounds on two ranks, then three on one, equal six on one; lags reach back beyond the checkpoint."""
    run = tiny_run.make_run(
        *lag_settings((3, 1), (2,)), "strategy.replay_policy=replay", "strategy.replay_policy.fraction=0.9", lanes=4
    )
    saved = pool(2, lambda world: tiny_run.save_after(run, 3, world, tmp_path)[0])[0]
    s = tiny_run.make_session(run, checkpoint_dir=saved)
    assert set(s.role.replay_state[0].rounds) == {0, 1, 2}
    for _ in range(3):
        play_round(s)
    uninterrupted = tiny_run.play_rounds(dataclasses.replace(run), 6)
    assert tiny_run.relative_distance(tiny_run.session_state(s), uninterrupted, "G/") < 2e-4
    assert tiny_run.relative_distance(tiny_run.session_state(s), uninterrupted, "D/") < 2e-4
