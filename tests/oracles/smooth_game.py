"""A small smooth game in float64, played by the program and, for oracles, as plain functions of two vectors.

An oracle is an algorithm written from its paper, without a look at the program. It gets the start x = (G, D) and the
gradient of each player's own loss, and must end where the program ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

import tiny_run
from paragan.comm.world import World
from paragan.config.resolve import resolve
from paragan.core.types import Batch
from paragan.strategies.base import assign_lanes
from paragan.train.build import Networks
from paragan.train.loop import play_round
from paragan.train.session import Session, build_session

LATENT = 4
GAME = ("data.labels=false", "objective.loss=wasserstein", "objective.r1=0", "batch=24", "lanes=12", "kimg=10")


class Vectors(NamedTuple):
    """The parameters of both players, or gradients, as vectors in the order of `named_parameters`."""

    g: Tensor
    d: Tensor


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LATENT, 12), nn.Softplus(), nn.Linear(12, 64), nn.Tanh()).double()

    def forward(self, z: Tensor, y: Tensor | None = None) -> Tensor:
        return self.body(z.double()).view(-1, 1, 8, 8)


class Discriminator(nn.Module):
    """Smooth, and nonlinear in its logits, so that Wasserstein losses have curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 12), nn.Softplus(), nn.Linear(12, 1)).double()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.body(x.double().flatten(1)).squeeze(1)


def make_networks() -> Networks:
    torch.manual_seed(5)
    return Networks(Generator(), Discriminator(), LATENT)


def make_session(settings: tuple[str, ...], world: World | None = None) -> Session:
    dataset = tiny_run.make_dataset()
    run = resolve(tiny_run.make_run(*GAME, *settings), dataset)
    return build_session(run, world or World.solo(), dataset, make_networks())


def play(settings: tuple[str, ...], rounds: int, world: World | None = None) -> Vectors:
    """Play rounds with the program, and return this rank's players. Settings as on the command line."""
    session = make_session(settings, world)
    for _ in range(rounds):
        play_round(session)
    if session.role.drain:
        session.role.drain()
    return vectors(session.game.g.net, session.game.d.net)


def vectors(g: nn.Module, d: nn.Module) -> Vectors:
    return Vectors(*(torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (g, d)))


def start() -> Vectors:
    """Return where every rank begins."""
    networks = make_networks()
    return vectors(networks.g, networks.d)


class Gradients:
    """The gradient of each player's own loss at any point, on the data that a rank has at a step.

    settings, ranks : of the run that the program plays
    """

    def __init__(self, settings: tuple[str, ...], ranks: int):
        self.session = make_session(settings)
        self.ranks = ranks
        self.networks = make_networks()

    def batch(self, rank: int, step: int) -> Batch:
        """Return the lanes of `rank` of the total batch number `step`, counted from 0."""
        run = self.session.run
        lanes = assign_lanes(run.lanes, rank, self.ranks).lanes
        return self.session.lanes.make_micro_batch(step * run.batch, lanes)

    def g(self, g: Tensor, d: Tensor, rank: int, step: int) -> Tensor:
        """Return the gradient in G of its loss -mean D(G(z))."""
        z = self.batch(rank, step).rng.normal("latent/G", LATENT)
        g = g.clone().requires_grad_(True)
        loss = -self._apply(self.networks.d, d, self._apply(self.networks.g, g, z)).mean()
        return torch.autograd.grad(loss, g)[0]

    def d(self, g: Tensor, d: Tensor, rank: int, step: int, latents: str = "D") -> Tensor:
        """Return the gradient in D of its loss mean D(G(z)) - mean D(x).

        Args:
            latents: which turn's latents z are: "D", or "G" where D trains on the images of G's turn.
        """
        batch = self.batch(rank, step)
        fakes = self._apply(self.networks.g, g, batch.rng.normal(f"latent/{latents}", LATENT)).detach()
        return self.d_on(fakes, d, rank, step)

    def d_on(self, fakes: Tensor, d: Tensor, rank: int, step: int) -> Tensor:
        """Return the gradient in D on these fakes and the reals of a step."""
        d = d.clone().requires_grad_(True)
        reals = self.batch(rank, step).images
        loss = (self._apply(self.networks.d, d, fakes) - self._apply(self.networks.d, d, reals)).mean()
        return torch.autograd.grad(loss, d)[0]

    def fakes(self, g: Tensor, rank: int, step: int, latents: str = "G") -> Tensor:
        """Return the images that G makes of the latents of a step."""
        with torch.no_grad():
            return self._apply(self.networks.g, g, self.batch(rank, step).rng.normal(f"latent/{latents}", LATENT))

    def _apply(self, net: nn.Module, vector: Tensor, x: Tensor) -> Tensor:
        named = dict(net.named_parameters())
        parts = vector.split([p.numel() for p in named.values()])
        return functional_call(net, {n: v.view(p.shape) for (n, p), v in zip(named.items(), parts)}, (x,))


def relative_difference(actual: Vectors, expected: Vectors) -> float:
    """Return the larger of both players' relative L2 differences."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)
