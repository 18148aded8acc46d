"""Lookahead: slow weights that follow fast ones (Zhang et al. 2019; for GANs Chavdarova et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def lookahead(optimizer: torch.optim.Optimizer, k: int, alpha: float) -> torch.optim.Optimizer:
    """Every `k` steps move the slow weights by `alpha` of the way to the fast ones, and continue from there.

    Adds hooks around `optimizer.step` and returns the optimizer. Slow weights are in the optimizer's state, so
    checkpoints contain them.
    """
    started: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def pre_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if "slow" not in optimizer.state.get(p, {}):
                    started[p] = p.clone()  # not in the state yet: many optimizers initialise only if it is empty

    @torch.no_grad()
    def post_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                if p in started:
                    state["slow"] = started.pop(p)
                    state["since"] = 0
                if "began" in state:  # between the two steps of an extragradient iteration
                    continue
                state["since"] += 1
                if state["since"] == k:
                    p.copy_(state["slow"].lerp_(p, alpha))
                    state["since"] = 0

    optimizer.register_step_pre_hook(pre_step)
    optimizer.register_step_post_hook(post_step)
    return optimizer
