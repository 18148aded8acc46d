"""A small real game for tests: the digits, tiny networks, every strategy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paragan.comm.world import World
from paragan.config.resolve import resolve, spec_of
from paragan.config.run import Run
from paragan.config.sections import Data, Device
from paragan.core.schema import build, override, plain
from paragan.data.dataset import Images, load
from paragan.nets import DCGAN
from paragan.optim.optimizers import Adam, Side
from paragan.train import checkpoint
from paragan.train.build import build_nets
from paragan.train.loop import play_round
from paragan.train.session import Session, assemble


def run(*settings: str, **fields: Any) -> Run:
    """A tiny run; settings as on the command line: "objective.r1=1"."""
    base = Run(
        recipe="toy",
        data=Data(path="digits", resolution=8, channels=1),
        nets=DCGAN(width=4, latent=8),
        g=Side(Adam(lr=2e-3, betas=(0.5, 0.9))),
        d=Side(Adam(lr=2e-3, betas=(0.5, 0.9))),
        batch=16,
        lanes=8,
        kimg=1.0,
        device=Device(precision="float32"),
    )
    base = dataclasses.replace(base, **fields)
    return build(Run, override(plain(base), [tuple(s.split("=", 1)) for s in settings]))


def images() -> Images:
    whole = load("digits", resolution=8)
    return dataclasses.replace(whole, images=whole.images[:300], labels=whole.labels[:300])


def session(of: Run, world: World | None = None, start: Any = None) -> Session:
    world = world or World.solo()
    data = images()
    of = resolve(of, data)
    loaded = start and checkpoint.read(start, world.rank, world.size)
    return assemble(of, world, data, build_nets(of, spec_of(of, data), world.device), loaded)


def play(of: Run, rounds: int, world: World | None = None) -> dict[str, Tensor]:
    """The state of both networks after some rounds."""
    s = session(of, world)
    for _ in range(rounds):
        play_round(s)
    return told(s)


def saved(of: Run, rounds: int, world: World, folder: Path) -> tuple[Path, Session]:
    """The checkpoint after some rounds, and the session that wrote it."""
    s = session(of, world)
    for _ in range(rounds):
        play_round(s)
    if s.role.settle:
        s.role.settle()
    clock = {"step": s.clock.step, "images": s.clock.images}
    return checkpoint.Checkpoints(folder, world).save(s.game.players, clock, {}, s.role), s


def state(s: Session) -> dict[str, Tensor]:
    """Parameters, buffers and average of a session, by name."""
    found = {f"{p.name}/{k}": v.clone() for p in s.game.players for k, v in p.net.state_dict().items()}
    return found | {"G/average": s.game.g.average.params.clone()}


def told(s: Session) -> dict[str, Tensor]:
    """The state of both networks, each from a rank that moves it."""
    found = state(s)
    if s.role.teams:
        assert s.role.settle
        s.role.settle()
        for name, value in found.items():
            if s.world.rank != s.role.speakers["GD".index(name[0])]:
                value.zero_()
            s.world.everyone.sum(value).wait()
    return found


def distance(a: dict[str, Tensor], b: dict[str, Tensor], prefix: str) -> float:
    """Relative L2 over everything whose name starts with `prefix`."""
    names = [n for n in a if n.startswith(prefix)]
    x, y = (torch.cat([s[n].double().flatten() for n in names]) for s in (a, b))
    return float((x - y).norm() / y.norm())


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)
