"""Ranks that step on their own, and agree on their mean every few steps: against ten lines that simulate them all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.functional import relu

import tiny_run
from paragan.comm.world import World
from paragan.train.loop import play_round

ALONE = ("g.optimizer_wrapper=none", "d.optimizer_wrapper=none")
PLAIN = ("nets.batch_norm=false", "nets.spectral=false", "g.optimizer=sgd", "d.optimizer=sgd")


def simulate_local_sgd(run, ranks, rounds, every):
    """Every rank's players in one process: steps of their own, and the mean before every `every`-th."""
    from paragan.strategies.base import assign_lanes

    base = tiny_run.make_session(run)
    games = [tiny_run.make_session(run).game for _ in range(ranks)]
    for step in range(rounds):
        for name in ("d", "g"):
            if step and step % every == 0:
                mean = torch.stack([getattr(game, name).flat.params for game in games]).mean(0)
                for game in games:
                    getattr(game, name).flat.params.copy_(mean)
            for rank, game in enumerate(games):
                player = getattr(game, name)
                mine = base.lanes.make_micro_batch(step * run.batch, assign_lanes(run.lanes, rank, ranks).lanes)
                z = mine.rng.normal(f"latent/{player.name}", 8)
                y = mine.rng.choice(f"label/{player.name}", game.labels)
                player.prepare_step((step + 1) * run.round_images)
                player.flat.grads.zero_()
                with player.requiring_grad():
                    fake = game.g.net(z, y)
                    if name == "d":
                        real = relu(1 - game.d.net(mine.images, mine.labels))
                        (real + relu(1 + game.d.net(fake.detach(), y))).mean().backward()
                    else:
                        (-game.d.net(fake, y).mean()).backward()
                player.step((step + 1) * run.round_images, run.round_images)
    return [{p.name: p.flat.params.clone() for p in game.players} for game in games]


@pytest.mark.parametrize("every", [2, 3])
def test_it_equals_a_simulation_of_all_ranks(pool, every):
    run = tiny_run.make_run("strategy=sync", f"strategy.sync_period={every}", *PLAIN)

    def job(world):
        s = tiny_run.make_session(run, world)
        for _ in range(7):
            play_round(s)
        return {p.name: p.flat.params.clone() for p in s.game.players}

    for mine, expected in zip(pool(4, job), simulate_local_sgd(run, 4, 7, every), strict=True):
        for name in mine:
            torch.testing.assert_close(mine[name], expected[name], rtol=2e-4, atol=2e-5)


def test_teams_keep_periods_of_their_own(pool):
    """Two ranks of G and two of D: within a period they are apart, and what is evaluated is the mean of a team."""
    from paragan.train.averaged_model import averaged_networks, consensus_distance

    run = tiny_run.make_run("strategy=async", "strategy.split='2:2'", "strategy.sync_period=2", *ALONE)

    def job(world):
        s = tiny_run.make_session(run, world)
        for _ in range(4):
            play_round(s)
        s.role.drain()
        own, apart = copy.deepcopy([p.flat.params for p in s.game.players]), consensus_distance(s)
        with averaged_networks(s):
            mean = s.game.d.flat.params.clone()
        return own, apart, mean

    found = pool(4, job)
    assert not torch.equal(found[0][0][0], found[1][0][0])
    assert not torch.equal(found[2][0][1], found[3][0][1])
    assert all(0 < found[0][1][f"Consensus/{name}"] < 0.1 for name in "GD")
    for _, _, mean in found:
        torch.testing.assert_close(mean, (found[2][0][1] + found[3][0][1]) / 2)


def test_several_steps_of_d_in_a_round(pool):
    """Right after D's turn begins in a round that agrees, all ranks are at one point."""
    run = tiny_run.make_run("strategy=sync", "strategy.sync_period=2", "d_steps=2", "objective.loss=wasserstein")

    def job(world):
        s, found = tiny_run.make_session(run, world), []
        prepare = s.game.d.net.register_forward_pre_hook(lambda *_: found.append(s.game.d.flat.params.clone()))
        for _ in range(5):
            found.clear()
            play_round(s)
        prepare.remove()
        return found[0]

    first, second = pool(2, job)
    assert torch.equal(first, second)


def test_alone_there_is_nothing_to_agree_on():
    assert tiny_run.is_equal(
        tiny_run.play_rounds(tiny_run.make_run("strategy=sync", "strategy.sync_period=2"), 5, World.solo()),
        tiny_run.play_rounds(tiny_run.make_run("strategy=sync"), 5),
    )
