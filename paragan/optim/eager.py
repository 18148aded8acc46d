"""Torch's optimizers without torch's compiler, whose import takes a third of the start of a run.

Torch decorates some methods of its optimizers for torch.compile, and the decorators import `torch._dynamo` at the first
call. These subclasses have the methods without them, and do the same.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

import torch

COMPILER_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")  # decorated for torch.compile
Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def _without_compiler(kind: type[Kind]) -> type[Kind]:
    undecorated_step = inspect.unwrap(kind.step)

    @functools.wraps(undecorated_step)
    def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return undecorated_step(self, *args, **kwargs)

    methods: dict[str, Any] = {name: inspect.unwrap(getattr(kind, name)) for name in COMPILER_METHODS}
    subclass: Any = type(kind.__name__, (kind,), {**methods, "step": step, "__module__": __name__})
    return subclass


Adam = _without_compiler(torch.optim.Adam)
AdamW = _without_compiler(torch.optim.AdamW)
RMSprop = _without_compiler(torch.optim.RMSprop)
SGD = _without_compiler(torch.optim.SGD)
