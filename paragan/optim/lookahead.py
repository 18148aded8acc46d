"""Slow weights that follow fast ones (Zhang et al. 2019, arXiv 1907.08610; for GANs Chavdarova et al. 2021)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def lookahead(optimizer: torch.optim.Optimizer, k: int, alpha: float) -> torch.optim.Optimizer:
    """Every `k` steps the slow weights go `alpha` of the way to the fast ones, which go on from there. Hooked around
    `optimizer.step`; what it needs is in the optimizer's own state, so checkpoints have it."""
    started: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def pre_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                if "slow" not in optimizer.state.get(p, {}):
                    started[p] = p.clone()  # many an optimizer takes a state that is not empty for its own

    @torch.no_grad()
    def post_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = optimizer.state[p]
                if p in started:
                    state["slow"], state["since"] = started.pop(p), 0
                if "began" in state:  # in the middle of an extragradient iteration
                    continue
                state["since"] += 1
                if state["since"] == k:
                    p.copy_(state["slow"].lerp_(p, alpha))
                    state["since"] = 0

    optimizer.register_step_pre_hook(pre_step)
    optimizer.register_step_post_hook(post_step)
    return optimizer
