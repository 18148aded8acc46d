"""TODO: docstring of paragan/plan/round_cost.py"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from paragan.config.run import Run
from paragan.data.dataset import Images
from paragan.plan.memory import Foreseen


def _pair(run: Any, images: Any, world: Any) -> Any:
    """The networks of a run, which were tried already if they are the user's own."""
    from paragan.config.resolve import spec_of
    from paragan.train.build import build_nets

    return dataclasses.replace(build_nets(run, spec_of(run, images), world.device), own=False)


def of_a_round(run: Run, images: Images) -> Foreseen:
    """What a round takes on one rank. Passes of as many lanes are alike: of many, the first three and the last are
    played, and what one more takes is counted as often as there are more."""
    from paragan.config.run import on_lanes
    from paragan.plan.memory import Foreseen, foresee

    def played(lanes: int) -> Foreseen:
        return foresee(lambda: one_round(on_lanes(run, lanes), images))

    each = run.device.merge or run.lanes
    more = run.lanes // each - 3
    if more < 1:
        return played(run.lanes)
    first, less = played(run.lanes - more * each), played(run.lanes - (more + 1) * each)
    flops, peak = first.flops - less.flops, first.peak_bytes - less.peak_bytes
    return Foreseen(first.flops + more * flops, first.peak_bytes + more * peak)


def one_round(run: Any, images: Any, world: Any = None) -> object:
    """Play one round in one process."""
    from paragan.comm.world import World
    from paragan.train.loop import play_round
    from paragan.train.session import assemble

    world = world or World.solo()
    session = assemble(run, world, images, _pair(run, images, world))
    play_round(session)
    return session


def few(images: Any) -> Any:
    """Images of the same shape and classes, none of which has to be read."""
    shape, labels = images.images.shape, images.labels
    blank = np.broadcast_to(np.zeros((), images.images.dtype), (1, *shape[1:]))
    return dataclasses.replace(images, images=blank, labels=None if labels is None else labels[:1])
