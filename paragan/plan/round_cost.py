"""TODO: docstring of paragan/plan/round_cost.py"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paragan.config.run import Run
from paragan.data.dataset import Dataset
from paragan.plan.memory import RoundCost


def build_tested_networks(run: Any, dataset: Any, world: Any) -> Any:
    """The networks of a run, which were tried already if they are the user's own."""
    from paragan.config.resolve import make_spec
    from paragan.train.build import build_networks

    return dataclasses.replace(build_networks(run, make_spec(run, dataset), world.device), is_user_defined=False)


def estimate_round(run: Run, dataset: Dataset) -> RoundCost:
    """What a round takes on one rank. Passes of as many lanes are alike: of many, the first three and the last are
    played, and what one more takes is counted as often as there are more."""
    from paragan.config.run import with_lanes
    from paragan.plan.memory import RoundCost, estimate

    def estimate_lanes(lanes: int) -> RoundCost:
        return estimate(lambda: play_one_round(with_lanes(run, lanes), dataset))

    each = run.device.lanes_per_pass or run.lanes
    more = run.lanes // each - 3
    if more < 1:
        return estimate_lanes(run.lanes)
    first, less = estimate_lanes(run.lanes - more * each), estimate_lanes(run.lanes - (more + 1) * each)
    flops, peak = first.flops - less.flops, first.peak_bytes - less.peak_bytes
    return RoundCost(first.flops + more * flops, first.peak_bytes + more * peak)


def play_one_round(run: Any, dataset: Any, world: Any = None) -> object:
    """Play one round in one process."""
    from paragan.comm.world import World
    from paragan.train.loop import play_round
    from paragan.train.session import build_session

    world = world or World.solo()
    session = build_session(run, world, dataset, build_tested_networks(run, dataset, world))
    play_round(session)
    return session


def blank_dataset(dataset: Any) -> Any:
    """Images of the same shape and classes, none of which has to be read."""
    shape, labels = dataset.images.shape, dataset.labels
    blank = np.broadcast_to(np.zeros((), dataset.images.dtype), (1, *shape[1:]))
    return dataclasses.replace(dataset, images=blank, labels=None if labels is None else labels[:1])
