"""What ranks keep, to go on from where all of them can after one was lost."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tiny_run
from paragan.comm.elastic.rejoin import SurvivorReport
from paragan.comm.elastic.survivors import continue_from, find_shutdown_reason
from paragan.strategies.sync import Sync
from paragan.train.round_snapshot import average_exchange_states


def test_ranks_of_the_highest_generation_keep_their_parameters():
    def continued(period: int, **steps: int) -> tuple[int, tuple[int, ...]]:
        generation = Sync(sync_period=period, peer_timeout_s=1).num_agreements
        reports = {int(r[1:]): SurvivorReport(0, step, 0, generation(max(step, 0))) for r, step in steps.items()}
        return continue_from(reports)

    assert continued(1, r0=7, r2=7) == (7, ())
    assert continued(1, r0=7, r1=8, r2=7) == (8, (0, 2))
    assert continued(1, r0=-1, r1=0) == (0, (0,))
    assert continued(4, r0=5, r1=7, r2=8) == (8, ())  # all have the mean of round 4, and none that of round 8
    assert continued(4, r0=8, r1=9, r2=12) == (12, (0,))  # rank 0 lacks that of round 8
    assert continued(4, r0=0, r1=1) == (1, (0,))
    assert continued(1, r1=-1) == (-1, (1,))


def test_number_of_ranks_that_go_on():
    assert find_shutdown_reason([0, 1], [1], [], exited=[0]) == "rank 0 has ended: no other rank remains"
    assert not find_shutdown_reason([0, 1], [1], [], exited=[0], min_ranks=1)
    assert "no majority" in find_shutdown_reason([0, 1], [1], [], exited=[], min_ranks=1)
    reason = "fewer than min_ranks=3 remain"
    assert find_shutdown_reason([0, 1, 2], [1, 2], [], exited=[0], min_ranks=3) == f"rank 0 has ended: {reason}"
    assert find_shutdown_reason([0, 1, 2], [1, 2], [], exited=[], min_ranks=3) == f"rank 0 cannot be reached: {reason}"


def test_images_after_rounds_of_a_growing_batch():
    run = dataclasses.replace(tiny_run.make_run(), ramp=((0.1, 32), (0.3, 64)), d_steps=2)
    images = 0
    for rounds in range(20):
        assert run.images_after(rounds) == images
        images += run.current_round_images(images)


def test_what_exchanges_keep_becomes_its_mean(pool):
    """That of a rank that was given the players of another one does not count."""

    def job(world):
        players = tiny_run.make_session(tiny_run.make_run(), world).game.players
        for player in players:
            player.flat.load_states({"residual": torch.full_like(player.flat.grads, float(world.rank))})
        average_exchange_states(players, world, is_included=world.rank != 2)
        return [float(value) for player in players for value in player.flat.states()["residual"].unique()]

    assert pool(4, job) == [pytest.approx([4 / 3, 4 / 3])] * 4
