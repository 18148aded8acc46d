"""A small real game for tests: the digits, tiny networks, every strategy."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paragan.comm.world import World
from paragan.config.resolve import load_dataset, make_spec, resolve
from paragan.config.run import Run
from paragan.config.sections import DataOptions, DeviceOptions
from paragan.core.schema import apply_overrides, from_dict, to_dict
from paragan.data.dataset import Dataset, load_data
from paragan.nets import DCGAN
from paragan.optim.optimizers import Adam, PlayerOptim
from paragan.train import checkpoint
from paragan.train.build import build_networks
from paragan.train.loop import play_round
from paragan.train.session import Session, build_session


def make_run(*settings: str, **fields: Any) -> Run:
    """A tiny run; settings as on the command line: "objective.r1=1"."""
    base = Run(
        recipe="toy",
        data=DataOptions(path="digits", resolution=8, channels=1),
        nets=DCGAN(width=4, latent=8),
        g=PlayerOptim(Adam(lr=2e-3, betas=(0.5, 0.9))),
        d=PlayerOptim(Adam(lr=2e-3, betas=(0.5, 0.9))),
        batch=16,
        lanes=8,
        kimg=1.0,
        device=DeviceOptions(precision="float32"),
    )
    base = dataclasses.replace(base, **fields)
    return from_dict(Run, apply_overrides(to_dict(base), [tuple(s.split("=", 1)) for s in settings]))


def make_dataset() -> Dataset:
    dataset = load_data("digits", resolution=8)
    return dataclasses.replace(dataset, images=dataset.images[:300], labels=dataset.labels[:300])


class OfDtype(nn.Module):
    """A network whose parameters are of another dtype than float32."""

    def __init__(self, net: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.net, self.dtype = net.to(dtype), dtype

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        return self.net(x.to(self.dtype), y)


def make_session(
    config: Run,
    world: World | None = None,
    checkpoint_dir: Any = None,
    dtype: torch.dtype | None = None,
) -> Session:
    """Build a session. dtype: of the parameters of both networks."""
    world = world or World.solo()
    data = make_dataset() if config.data.path == "digits" else load_dataset(config.data)
    config = resolve(config, data)
    loaded = checkpoint_dir and checkpoint.read_checkpoint(checkpoint_dir, world.rank, world.size)
    networks = build_networks(config, make_spec(config.data, data), world.device)
    if dtype:
        networks = dataclasses.replace(networks, g=OfDtype(networks.g, dtype), d=OfDtype(networks.d, dtype))
    return build_session(config, world, data, networks, loaded)


def play_rounds(config: Run, rounds: int, world: World | None = None) -> dict[str, Tensor]:
    """The state of both networks after some rounds."""
    s = make_session(config, world)
    for _ in range(rounds):
        play_round(s)
    return gather_owner_state(s)


def save_after(
    config: Run, rounds: int, world: World, folder: Path, dtype: torch.dtype | None = None
) -> tuple[Path, Session]:
    """The checkpoint after some rounds, and the session that wrote it."""
    s = make_session(config, world, dtype=dtype)
    for _ in range(rounds):
        play_round(s)
    if s.role.drain:
        s.role.drain()
    clock = {"step": s.clock.step, "images": s.clock.images, "seconds": 0.0}
    return checkpoint.Checkpoints(folder, world).save(s.game.players, clock, {}, s.role), s


def session_state(s: Session) -> dict[str, Tensor]:
    """Parameters, buffers and average of a session, by name."""
    state = {f"{p.name}/{k}": v.clone() for p in s.game.players for k, v in p.net.state_dict().items()}
    return state | {"G/average": s.game.g.ema.full_vector().clone()}


def gather_owner_state(s: Session) -> dict[str, Tensor]:
    """The state of both networks, each from a rank that moves it."""
    state = session_state(s)
    if s.role.is_split:
        assert s.role.drain
        s.role.drain()
        for name, value in state.items():
            if s.world.rank != s.role.owner_ranks["GD".index(name[0])]:
                value.zero_()
            s.world.all_ranks.all_reduce_sum(value).wait()
    return state


def relative_distance(a: dict[str, Tensor], b: dict[str, Tensor], prefix: str) -> float:
    """Relative L2 over everything whose name starts with `prefix`."""
    names = [n for n in a if n.startswith(prefix)]
    x, y = (torch.cat([s[n].double().flatten() for n in names]) for s in (a, b))
    return float((x - y).norm() / y.norm())


def is_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def resumes_bit_for_bit(run: Run, world: World, folder: Path, rounds: int, more: int) -> bool:
    """Return whether so many rounds, a checkpoint and more rounds equal as many without one."""
    whole = play_rounds(run, rounds + more, world)
    saved, _ = save_after(run, rounds, world, folder)
    session = make_session(run, world, saved)
    for _ in range(more):
        play_round(session)
    return is_equal(whole, gather_owner_state(session))
