"""Operations and peak memory of one round, found by playing it with tensors that have no storage (plan/memory.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paragan.comm.world import World
from paragan.config.resolve import make_spec
from paragan.config.run import Run, with_lanes
from paragan.data.dataset import Dataset
from paragan.plan.memory import RoundCost, estimate
from paragan.train.build import Networks, build_networks
from paragan.train.loop import play_round
from paragan.train.session import Session, build_session

NUM_PLAYED_PASSES = 4  # of a round with many passes: the first three and the last


def build_tested_networks(run: Run, dataset: Dataset, world: World) -> Networks:
    """Build the networks of a run, without the tests that user-defined networks get before a run starts."""
    return dataclasses.replace(build_networks(run, make_spec(run.data, dataset), world.device), is_user_defined=False)


def estimate_round(run: Run, dataset: Dataset) -> RoundCost:
    """Estimate what a round costs on one rank.

    All passes of equally many lanes cost the same. Of many passes, the first three and the last are played, and the
    cost of one more is added for each of the others.
    """

    def estimate_lanes(lanes: int) -> RoundCost:
        return estimate(lambda: play_one_round(with_lanes(run, lanes), dataset))

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


def play_one_round(run: Run, dataset: Dataset, world: World | None = None) -> Session:
    """Build a session, in one process by default, play one round and return the session."""
    world = world or World.solo()
    session = build_session(run, world, dataset, build_tested_networks(run, dataset, world))
    play_round(session)
    return session


def blank_dataset(dataset: Any) -> Any:
    """Return a dataset of the same image shape and classes with one blank image, so that no image is read."""
    images = np.broadcast_to(np.zeros((), dataset.images.dtype), (1, *dataset.images.shape[1:]))
    labels = None if dataset.labels is None else dataset.labels[:1]
    return dataclasses.replace(dataset, images=images, labels=labels)
