"""Optimism: small changes to any optimizer that make two players meet instead of circling each other.

Each is hooked around `optimizer.step` and keeps what it needs in the optimizer's own state, so checkpoints have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor


def optimistic(optimizer: torch.optim.Optimizer, extrapolation: float = 1.0) -> torch.optim.Optimizer:
    """w <- w - 2 u + u_before, where the optimizer alone would make w <- w - u (Daskalakis et al. 2018: OAdam).

    u is the step as made, learning rate and all. extrapolation: another weight for what is looked ahead,
    w <- w - u - extrapolation (u - u_before) (Mokhtari et al. 2020: generalized OGDA).
    """
    here: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def pre_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in _parameters(optimizer):
            here[p] = here[p].copy_(p) if p in here else p.clone()

    @torch.no_grad()
    def post_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for p in _parameters(optimizer):
            step = here[p].sub_(p)  # u
            state = optimizer.state[p]
            p.sub_(step, alpha=extrapolation)
            if "last_step" in state:
                p.add_(state["last_step"], alpha=extrapolation)
                here[p], state["last_step"] = state["last_step"], step
            else:
                state["last_step"] = step
                del here[p]

    optimizer.register_step_pre_hook(pre_step)
    optimizer.register_step_post_hook(post_step)
    return optimizer


def extragradient(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Every second step is made from where the one before it began, with the gradient of where that one led
    (Korpelevich 1976; Gidel et al. 2019: ExtraAdam). A round is half an iteration, so it needs twice the images.
    """

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

    started: dict[Tensor, Tensor] = {}
    optimizer.register_step_pre_hook(pre_step)
    optimizer.register_step_post_hook(post_step)
    return optimizer


def get_wrapper(name: str, extrapolation: float | None) -> Callable[[torch.optim.Optimizer], torch.optim.Optimizer]:
    """What is put around an optimizer."""
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
