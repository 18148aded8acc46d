"""Local SGD, with averaging every few steps, compared with a simulation of all ranks."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch.nn.functional import relu

import tiny_run
from advice import advises
from paragan.comm.world import World
from paragan.config.validate import describe_unused_length, validate
from paragan.core.errors import UsageError
from paragan.train.loop import play_round

NO_WRAPPER = ("g.optimizer_wrapper=none", "d.optimizer_wrapper=none")
PLAIN = ("nets.batch_norm=false", "nets.spectral=false", "g.optimizer=sgd", "d.optimizer=sgd")


def simulate_local_sgd(run, ranks, rounds, sync_period):
    """Step every rank's players in one process, and average both after every `sync_period` rounds."""
    from paragan.strategies.base import assign_lanes

    base = tiny_run.make_session(run)
    games = [tiny_run.make_session(run).game for _ in range(ranks)]
    for step in range(rounds):
        if step and step % sync_period == 0:
            for name in ("d", "g"):
                mean = torch.stack([getattr(game, name).flat.params for game in games]).mean(0)
                for game in games:
                    getattr(game, name).flat.params.copy_(mean)
        for name in ("d", "g"):
            for rank, game in enumerate(games):
                player = getattr(game, name)
                batch = base.lanes.make_micro_batch(step * run.batch, assign_lanes(run.lanes, rank, ranks).lanes)
                z = batch.rng.normal(f"latent/{player.name}", 8)
                y = batch.rng.choice(f"label/{player.name}", game.labels)
                player.prepare_step((step + 1) * run.round_images)
                player.flat.grads.zero_()
                with player.requiring_grad():
                    fake = game.g.net(z, y)
                    if name == "d":
                        real = relu(1 - game.d.net(batch.images, batch.labels))
                        (real + relu(1 + game.d.net(fake.detach(), y))).mean().backward()
                    else:
                        (-game.d.net(fake, y).mean()).backward()
                player.step((step + 1) * run.round_images, run.round_images)
    return [{p.name: p.flat.params.clone() for p in game.players} for game in games]


@pytest.mark.slow(after=1)
@pytest.mark.parametrize("sync_period", [2, 3])
def test_equals_a_simulation_of_all_ranks(pool, sync_period):
    run = tiny_run.make_run("strategy=sync", f"strategy.sync_period={sync_period}", *PLAIN)

    def job(world):
        s = tiny_run.make_session(run, world)
        for _ in range(7):
            play_round(s)
        return {p.name: p.flat.params.clone() for p in s.game.players}

    for params, expected in zip(pool(4, job), simulate_local_sgd(run, 4, 7, sync_period), strict=True):
        for name in params:
            torch.testing.assert_close(params[name], expected[name], rtol=2e-4, atol=2e-5)


def test_teams_average_separately(pool):
    """Two ranks of G and two of D differ within a period; the mean of each team is evaluated."""
    from paragan.core.host_copies import copy_to_host
    from paragan.train.averaged_model import averaged_networks, consensus_distance, consensus_terms

    run = tiny_run.make_run("strategy=async", "strategy.split='2:2'", "strategy.sync_period=2", *NO_WRAPPER)

    def job(world):
        s = tiny_run.make_session(run, world)
        for _ in range(4):
            play_round(s)
        s.role.drain()
        g, d = copy.deepcopy([p.flat.params for p in s.game.players])
        distances = consensus_distance(s, copy_to_host(consensus_terms(s)))
        with averaged_networks(s):
            mean_d = s.game.d.flat.params.clone()
        return g, d, distances, mean_d

    results = pool(4, job)
    (g0, _, distances, _), (g1, *_), (_, d2, *_), (_, d3, *_) = results
    assert not torch.equal(g0, g1)
    assert not torch.equal(d2, d3)
    assert all(0 < distances[f"Consensus/{name}"] < 0.1 for name in "GD")
    for *_, mean_d in results:
        torch.testing.assert_close(mean_d, (d2 + d3) / 2)


def test_several_steps_of_d_in_a_round(pool):
    """In a round that averages, all ranks have equal parameters at the start of D's turn."""
    run = tiny_run.make_run("strategy=sync", "strategy.sync_period=2", "d_steps=2", "objective.loss=wasserstein")

    def job(world):
        s = tiny_run.make_session(run, world)
        params = []
        hook = s.game.d.net.register_forward_pre_hook(lambda *_: params.append(s.game.d.flat.params.clone()))
        for _ in range(5):
            params.clear()
            play_round(s)
        hook.remove()
        return params[0]

    first, second = pool(2, job)
    assert torch.equal(first, second)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_accumulated_over_a_period_n_ranks_equal_one_step_on_all_its_images(pool, strategy, ranks):
    run = tiny_run.make_run(f"strategy={strategy}", "strategy.sync_period=3", "strategy.sync_mode=accumulate", *PLAIN)

    def job(world):
        s = tiny_run.make_session(run, world)
        rows = [(s.game.g.flat.params.clone(), s.game.d.flat.params.clone())]
        for _ in range(6):
            play_round(s)
            rows.append((s.game.g.flat.params.clone(), s.game.d.flat.params.clone()))
        if s.role.drain:
            s.role.drain()
        return rows, [player in s.role.trained_players for player in s.game.players]

    one, _ = job(World.solo())
    for rows, trained in pool(ranks, job):
        for player in (0, 1):
            params = [row[player] for row in rows]
            moved = [not torch.equal(a, b) for a, b in itertools.pairwise(params)]
            assert moved == [False, False, True, False, False, True] or not trained[player]
            if trained[player]:
                torch.testing.assert_close(params[-1], one[-1][player], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("owner", ["strategy", "strategy.per_label_strategy"])
def test_several_steps_of_d_cannot_be_accumulated(owner):
    """This is known before anything is built: a dry run says it too."""
    choice = "strategy=per-label" if owner.endswith("per_label_strategy") else "strategy=sync"
    settings = (choice, f"{owner}.sync_period=2", f"{owner}.sync_mode=accumulate", "d_steps=2")
    with advises(
        f"{owner}.sync_mode=accumulate: sums one gradient of D in a round, and d_steps is 2. Use --d_steps=1, or "
        f"--{owner}.sync_mode=parameters."
    ):
        validate(tiny_run.make_run(*settings))
    for remedy in ("d_steps=1", f"{owner}.sync_mode=parameters"):
        validate(tiny_run.make_run(*settings, remedy))


def test_several_steps_of_d_average_once_in_a_period(pool):
    run = tiny_run.make_run("strategy=sync", "strategy.sync_period=2", "d_steps=3")

    def job(world):
        s = tiny_run.make_session(run, world)
        sent = [0]
        for _ in range(4):
            play_round(s)
            sent.append(s.game.d.meter.sent_bytes)
        return [b - a for a, b in itertools.pairwise(sent)], 4 * s.game.d.flat.params.numel()

    for sent, nbytes in pool(2, job):
        assert sent == [nbytes, 0, nbytes, 0]


def test_one_rank_equals_sync():
    assert tiny_run.is_equal(
        tiny_run.play_rounds(tiny_run.make_run("strategy=sync", "strategy.sync_period=2"), 5, World.solo()),
        tiny_run.play_rounds(tiny_run.make_run("strategy=sync"), 5),
    )


def test_rounds_after_the_last_step_are_reported():
    accumulate = ("strategy.sync_period=3", "strategy.sync_mode=accumulate")
    (note,) = describe_unused_length(tiny_run.make_run(*accumulate, "kimg=0.128"))
    assert note.startswith("the last 2 of 8 rounds take no step")
    assert not describe_unused_length(tiny_run.make_run(*accumulate, "kimg=0.144"))
    assert not describe_unused_length(tiny_run.make_run("strategy.sync_period=3", "kimg=0.128"))


def test_a_period_longer_than_a_run_whose_batch_grows_raises():
    run = tiny_run.make_run(
        "strategy.sync_period=5", "strategy.sync_mode=accumulate", "ramp=0.016:64", "kimg=0.144"
    )  # 3 rounds, of the images of 9 first ones
    with pytest.raises(UsageError, match="the run has 3 rounds"):
        validate(run, 2)
