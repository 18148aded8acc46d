"""paragan's side of every comparison: a session, assembled as `paragan train` does it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from benchmarks.lib.timing import Play, repeated
from paragan.comm.world import World
from paragan.config.resolve import resolve, spec_of
from paragan.config.run import Run
from paragan.core.schema import build, override
from paragan.core.schema import plain as as_data
from paragan.data.dataset import Images
from paragan.nets.resample import DownConv, UpConv
from paragan.recipes import recipe
from paragan.train.build import build_nets
from paragan.train.loop import play_round
from paragan.train.session import Session, assemble

CPU = torch.device("cpu")
Change = Callable[[Session], None]


def noise(resolution: int, channels: int, count: int = 1024) -> Images:
    """Random images of ten classes."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, resolution, resolution, channels), np.uint8)
    return Images(images, rng.integers(0, 10, count), tuple("0123456789"), "random")


def endless(name: str, images: Images, *settings: str) -> Run:
    """A recipe that outlasts every benchmark; settings as on the command line."""
    data = override(as_data(recipe(name)), [tuple(s.split("=")) for s in ("data.path=given", "kimg=1e6", *settings)])
    return resolve(build(Run, data), images)


def unchanged(session: Session) -> None:
    pass


def session(run: Run, images: Images, world: World | None = None, change: Change = unchanged) -> Session:
    """`change` takes an ingredient out."""
    world = world or World.solo()
    made = assemble(run, world, images, build_nets(run, spec_of(run, images), world.device))
    change(made)
    return made


def playing(session: Session) -> Play:
    return repeated(lambda: play_round(session))


# Ingredients taken out ------------------------------------------------------------------------------------


def thaw(session: Session) -> None:
    """D's weights get gradients in G's turn too, which nobody uses."""
    for player in session.game.players:
        player.net.requires_grad_(True)
        player._thaw = lambda moving: None


def convolve_as_written(session: Session) -> None:
    """3x3 convolutions after upsampling and before pooling, instead of one 4x4 convolution of stride 2."""
    for player in session.game.players:
        for layer in player.net.modules():
            if isinstance(layer, UpConv | DownConv):
                layer.rewritten = False
