"""Torch's optimizers without torch's compiler, whose import takes a third of the start of a run."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch

COMPILER_METHODS = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")  # decorated for torch.compile
Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


def eager(kind: type[Kind]) -> type[Kind]:
    """Return a subclass of an optimizer of torch that does the same without importing torch's compiler.

    Torch decorates some methods of its optimizers for torch.compile, and the decorators import `torch._dynamo` at the
    first call. The subclass has the methods without them.
    """
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in COMPILER_METHODS}
    methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    subclass: Any = type(kind.__name__, (kind,), methods)
    return subclass
