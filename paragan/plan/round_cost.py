"""Operations and peak memory of one round, found by playing it with tensors that have no storage (plan/memory.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.run import Run, with_lanes
from paragan.core.rng import CPU
from paragan.data.dataset import Dataset
from paragan.game.game import Game
from paragan.plan.memory import RoundCost, estimate, fake_tensor_mode
from paragan.plan.predict.simulated_world import lone_world
from paragan.strategies.base import Role
from paragan.train.build import Networks, build_game, build_networks
from paragan.train.loop import play_round
from paragan.train.round_snapshot import RoundSnapshot
from paragan.train.session import Session, build_session

NUM_PLAYED_PASSES = 4  # of a round with many passes: the first three and the last


def build_tested_networks(run: Run, dataset: Dataset, world: World) -> Networks:
    """Build the networks of a run, without the tests that user-defined networks get before a run starts."""
    return dataclasses.replace(build_networks(run, make_spec(run.data, dataset), world.device), is_user_defined=False)


def estimate_round(run: Run, dataset: Dataset, ranks: int = 1) -> RoundCost:
    """Estimate what a round costs on one rank that has all lanes of the run.

    All passes of equally many lanes cost the same. Of many passes, the first three and the last are played, and the
    cost of one more is added for each of the others.

    Args:
        run: with the lanes of the rank only.
        dataset: blank.
        ranks: as in `play_rank_round`.
    """

    def estimate_lanes(lanes: int) -> RoundCost:
        return estimate(lambda: play_rank_round(run, dataset, lanes, ranks))

    lanes_per_pass = run.device.lanes_per_pass or run.lanes
    num_skipped = run.lanes // lanes_per_pass - (NUM_PLAYED_PASSES - 1)
    if num_skipped < 1:
        return estimate_lanes(run.lanes)
    four_passes = estimate_lanes(run.lanes - num_skipped * lanes_per_pass)
    three_passes = estimate_lanes(run.lanes - (num_skipped + 1) * lanes_per_pass)
    return RoundCost(
        four_passes.flops + num_skipped * (four_passes.flops - three_passes.flops),
        four_passes.peak_bytes + num_skipped * (four_passes.peak_bytes - three_passes.peak_bytes),
    )


def play_one_round(
    run: Run, dataset: Dataset, world: World | None = None, snapshot: RoundSnapshot | None = None
) -> Session:
    """Build a session, in one process by default, play one round as if others had come before, and return the session.

    Args:
        snapshot: that a rank keeps during the round.
    """
    world = world or World.solo()
    session = build_session(run, world, dataset, build_tested_networks(run, dataset, world))
    for player in session.game.players:
        player.flat.grads.zero_()
        player.optimizer.step()  # allocates the state of the optimizer, which every round but the first begins with
    if snapshot:
        snapshot.capture(session)
    play_round(session)
    return session


def play_rank_round(run: Run, dataset: Dataset, lanes: int, ranks: int = 1, device: torch.device = CPU) -> Session:
    """Build the session of a rank that has so many lanes, play one round and return the session.

    Args:
        ranks: that divide the states of optimizers among them, if the strategy does that.
    """
    snapshot = RoundSnapshot() if run.strategy.replays_broken_rounds and ranks > 1 else None
    if not run.strategy.shard_optimizer or ranks == 1:
        return play_one_round(with_lanes(run, lanes), dataset, World.solo(device), snapshot)
    return play_one_round(with_lanes(run, lanes * ranks), dataset, lone_world(ranks, device=device), snapshot)


def build_roles(run: Run, dataset: Dataset, ranks: int) -> tuple[Game, list[Role]]:
    """Build the game of a run without storage, and the role that all ranks have, or one of each team."""
    world = lone_world(ranks)
    with fake_tensor_mode():
        game = build_game(run, build_tested_networks(run, dataset, world), dataset, world.device)
        roles = [run.strategy.role(game, world, run.lanes)]
        if roles[0].is_split:
            g_ranks = roles[0].owner_ranks[1]
            split_strategy = dataclasses.replace(run.strategy, split=f"{g_ranks}:{ranks - g_ranks}")
            roles.append(split_strategy.role(game, lone_world(ranks, g_ranks), run.lanes))
    return game, roles


def count_rank_lanes(run: Run, dataset: Dataset, ranks: int) -> int:
    """Return the number of lanes of the rank that has most."""
    _, roles = build_roles(run, dataset, ranks)
    return max(len(role.share.lanes) for role in roles)


def largest_stage(run: Run) -> Run:
    """Return a run without ramp, whose batch is the largest that the run reaches, and G's grown with it.

    Its passes are not captured: a round is played once.
    """
    batch = max(batch for start, batch in run.stages if start < max(run.total_images, 1))
    device = dataclasses.replace(run.device, capture_passes=False)
    return dataclasses.replace(run, ramp=(), batch=batch, g_batch=run.g_batch * batch // run.batch, device=device)


def blank_dataset(dataset: Any) -> Any:
    """Return a dataset of the same image shape and classes with one blank image, so that no image is read."""
    if dataset.fields:
        images = dataset.images.blank()
    else:
        images = np.broadcast_to(np.zeros((), dataset.images.dtype), (1, *dataset.images.shape[1:]))
    labels = None if dataset.labels is None else dataset.labels[:1]
    return dataclasses.replace(dataset, images=images, labels=labels)
