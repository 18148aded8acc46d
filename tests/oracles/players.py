"""Both players as one vector w = (G, D), and the steps of optimizers, written out for oracles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import smooth_game
import torch
from smooth_game import Gradients, Vectors, relative_difference
from torch import Tensor

RATE_G, RATE_D = 0.05, 0.08
BETAS, EPS = (0.5, 0.9), 1e-8
SGD = ("g.optimizer=sgd", "d.optimizer=sgd", f"g.optimizer.lr={RATE_G}", f"d.optimizer.lr={RATE_D}")
ADAM = (f"g.optimizer.lr={RATE_G}", f"d.optimizer.lr={RATE_D}")  # betas and eps of tiny_run
UNEQUAL = ("lanes=8", "batch=16")  # of 3 ranks two have 3 lanes, and one 2
PLAIN = ("g.optimizer_wrapper=none", "d.optimizer_wrapper=none")


class JointGame(Gradients):
    """A game whose players are one vector w; `rates` has the learning rate of each of its numbers."""

    def __init__(self, settings: tuple[str, ...], ranks: int):
        super().__init__(settings, ranks)
        self.start = torch.cat(smooth_game.start())
        self.rates = torch.cat([torch.full_like(v, r) for v, r in zip(smooth_game.start(), (RATE_G, RATE_D))])

    def gradient(self, w: Tensor, rank: int, step: int, latents: str = "D") -> Tensor:
        """Return F(w): the gradients of both players, each of its own loss."""
        g, d = split(w)
        return torch.cat([self.g(g, d, rank, step), self.d(g, d, rank, step, latents)])

    def mean_gradient(self, w: Tensor, step: int, latents: str = "D") -> Tensor:
        """Return F(w) on the total batch."""
        return sum(share * self.gradient(w, i, step, latents) for i, share in enumerate(self.shares()))

    def shares(self) -> list[float]:
        """Return each rank's part of the total batch."""
        images = [len(self.batch(i, 0).images) for i in range(self.ranks)]
        return [n / sum(images) for n in images]


def split(w: Tensor) -> Vectors:
    return Vectors(*w.split(_sizes()))


@functools.cache
def _sizes() -> list[int]:
    return [v.numel() for v in smooth_game.start()]


class Descent:
    """u = lr g."""

    def __init__(self, rate: Tensor | float):
        self.rate = rate

    def __call__(self, gradient: Tensor) -> Tensor:
        return self.rate * gradient


class Adam:
    """Kingma & Ba 2015, algorithm 1."""

    def __init__(self, rate: Tensor | float):
        self.rate, self.t, self.m, self.v = rate, 0, 0.0, 0.0

    def __call__(self, gradient: Tensor) -> Tensor:
        b1, b2 = BETAS
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * gradient
        self.v = b2 * self.v + (1 - b2) * gradient**2
        m, v = self.m / (1 - b1**self.t), self.v / (1 - b2**self.t)
        return self.rate * m / (v.sqrt() + EPS)


class Optimistic:
    """w <- w - u_k - a (u_k - u_{k-1}), u_0 = 0 (Daskalakis et al. 2018 with a = 1)."""

    def __init__(self, inner: Callable[[Tensor], Tensor], a: float = 1.0):
        self.inner, self.a, self.before = inner, a, 0.0

    def __call__(self, gradient: Tensor) -> Tensor:
        u = self.inner(gradient)
        step, self.before = u + self.a * (u - self.before), u
        return step


def check(pool, settings: tuple[str, ...], rounds: int, expected: Sequence[Tensor], tolerance: float = 1e-12) -> None:
    """Play rounds on as many ranks as `expected` has, and compare where each rank ends."""
    actual = pool(len(expected), lambda world: smooth_game.play(settings, rounds, world))
    assert max(relative_difference(a, split(e)) for a, e in zip(actual, expected, strict=True)) < tolerance
