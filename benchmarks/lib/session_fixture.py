"""Build a session as `paragan train` does: paragan's side of every comparison."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.lib.timing import StepsFn, repeat_fn
from paragan.comm.world import World
from paragan.config.resolve import make_spec, resolve
from paragan.config.run import Run
from paragan.core.schema import apply_overrides, from_dict
from paragan.core.schema import to_dict as as_data
from paragan.data.dataset import Dataset
from paragan.nets.resample import DownConv, UpConv
from paragan.recipes import get_recipe
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import Session, build_session

CPU = torch.device("cpu")
SessionChange = Callable[[Session], None]


def random_dataset(resolution: int, channels: int, count: int = 1024) -> Dataset:
    """Return random images of ten classes."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, resolution, resolution, channels), np.uint8)
    return Dataset(images, rng.integers(0, 10, count), tuple("0123456789"), "random")


def make_endless_run(name: str, images: Dataset, *settings: str) -> Run:
    """Return a recipe that outlasts every benchmark; settings as on the command line, without dashes."""
    overrides = [tuple(setting.split("=")) for setting in ("data.path=given", "kimg=1e6", *settings)]
    return resolve(from_dict(Run, apply_overrides(as_data(get_recipe(name)), overrides)), images)


def no_change(session: Session) -> None:
    pass


def make_session(run: Run, images: Dataset, world: World | None = None, change: SessionChange = no_change) -> Session:
    """Build a session; `change` modifies it, to measure what an optimization is worth."""
    world = world or World.solo()
    session = build_session(run, world, images, build_networks(run, make_spec(run.data, images), world.device))
    change(session)
    return session


def make_play_fn(session: Session) -> StepsFn:
    return repeat_fn(lambda: play_round(session))


# Optimizations removed ------------------------------------------------------------------------------------


def require_d_grads(session: Session) -> None:
    """Compute gradients of D's weights in G's turn too, which are not used."""
    for player in session.game.players:
        player.net.requires_grad_(True)
        player._set_requires_grad = lambda moving: None


def use_separate_resampling(session: Session) -> None:
    """Use 3x3 convolutions after upsampling and before pooling, instead of one 4x4 convolution of stride 2."""
    for player in session.game.players:
        for layer in player.net.modules():
            if isinstance(layer, UpConv | DownConv):
                layer.fused_resampling = False
