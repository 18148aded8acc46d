"""Wrappers for optimizers of games: without them the two players can circle each other instead of converging.

Each adds hooks around `optimizer.step` and stores its state in the optimizer's state, so checkpoints contain it. A
strategy asks for a wrapper by name. The update of the quantized paper is not here: it is an exchange that moves to
where the gradient is computed and back (`OptimisticMirrorDescent`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor


def optimistic(optimizer: torch.optim.Optimizer, extrapolation: float = 1.0) -> torch.optim.Optimizer:
    """Turn the update w <- w - u into w <- w - 2 u + u_previous (OAdam, Daskalakis et al. 2018).

    u is the whole update, including the learning rate. In general the update is
    w <- w - u - extrapolation (u - u_previous) (generalized OGDA, Mokhtari et al. 2020).
    """
    previous: dict[Tensor, Tensor] = {}  # weights before the step

    @torch.no_grad()
    def pre_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in _parameters(optimizer):
            previous[p] = previous[p].copy_(p) if p in previous else p.clone()

    @torch.no_grad()
    def post_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in _parameters(optimizer):
            step = previous[p].sub_(p)  # u
            state = optimizer.state[p]
            p.sub_(step, alpha=extrapolation)
            if "last_step" in state:
                p.add_(state["last_step"], alpha=extrapolation)
                previous[p] = state["last_step"]  # reuse its memory
                state["last_step"] = step
            else:
                state["last_step"] = step
                del previous[p]

    optimizer.register_step_pre_hook(pre_step)
    optimizer.register_step_post_hook(post_step)
    return optimizer


def extragradient(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Start every second step from where the step before it started (ExtraAdam, Gidel et al. 2019; Korpelevich 1976).

    Its gradient is that at the point where the first step led. A round is half an iteration, so training needs twice
    the images.
    """
    started: dict[Tensor, Tensor] = {}  # weights before the first step of an iteration

    @torch.no_grad()
    def pre_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in _parameters(optimizer):
            state = optimizer.state.get(p, {})
            if "began" in state:
                p.copy_(state.pop("began"))
            else:
                started[p] = p.clone()

    @torch.no_grad()
    def post_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in list(started):
            optimizer.state[p]["began"] = started.pop(p)

    optimizer.register_step_pre_hook(pre_step)
    optimizer.register_step_post_hook(post_step)
    return optimizer


def get_wrapper(name: str, extrapolation: float | None) -> Callable[[torch.optim.Optimizer], torch.optim.Optimizer]:
    """Return the wrapper of a name: "optimistic", "extragradient" or "none". `extrapolation` is of optimistic."""
    match name:
        case "optimistic":
            assert extrapolation is not None
            return partial(optimistic, extrapolation=extrapolation)
        case "extragradient":
            return extragradient
        case _:
            assert name == "none", name
            return lambda optimizer: optimizer


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
