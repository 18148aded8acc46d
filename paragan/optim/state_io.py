"""An optimizer's state as named tensors, and back: what a checkpoint has of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paragan.core.errors import RunError

NUMBER_SUFFIX = "="  # ends the name of what was a plain number
UNSAVED_KEYS = ("params", "lr", "initial_lr")  # what is set anew before every step, and what is stepped


class UnsupportedStateError(RunError):
    """An optimizer keeps something else than tensors and numbers."""


def to_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{"0/exp_avg": ...} for the state of every parameter, and {"group0/step=": ...} for what of a group is not as it
    was given. The learning rate is set before each step, so it is left out."""
    saved, tensors = optimizer.state_dict(), dict[str, Tensor]()
    for i, entry in saved["state"].items():
        if not isinstance(i, int):
            raise UnsupportedStateError(f"{i}, which belongs to no parameter")
        for key, value in entry.items():
            tensors |= _named_tensors(f"{i}/{key}", value)
    for i, group in enumerate(saved["param_groups"]):
        given = optimizer.defaults
        for key, value in group.items():
            if key not in UNSAVED_KEYS and not (key in given and _equal(given[key], value)):
                tensors |= _named_tensors(f"group{i}/{key}", value)
    return tensors


def from_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put `to_tensors` back."""
    groups = [_initial_group(group, optimizer.defaults) for group in optimizer.state_dict()["param_groups"]]
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        owner, _, key = name.partition("/")
        in_group = owner.startswith("group")  # torch moves what is in the state to its parameter's device, but not this
        value = tensor.to(optimizer.param_groups[int(owner[5:])]["params"][0].device) if in_group else tensor
        entry = groups[int(owner[5:])] if in_group else state.setdefault(int(owner), {})
        entry[key.removesuffix(NUMBER_SUFFIX)] = value.tolist() if key.endswith(NUMBER_SUFFIX) else value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _initial_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group before its first step: this optimizer may have made some."""
    fixed = {
        key: value for key, value in group.items() if key in UNSAVED_KEYS or not isinstance(value, int | float | Tensor)
    }
    return fixed | {key: value for key, value in defaults.items() if key not in UNSAVED_KEYS}


def _named_tensors(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if value is None:
        return {}
    if isinstance(value, bool | int | float):
        return {name + NUMBER_SUFFIX: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)}
    raise UnsupportedStateError(f"{name} is a {type(value).__name__}")


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
