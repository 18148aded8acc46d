"""Convert an optimizer's state to named tensors for a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paragan.core.errors import RunError

NUMBER_SUFFIX = "="  # of names whose value was a Python number
LR_KEYS = ("lr", "initial_lr")


class UnsupportedStateError(RunError):
    """The state of an optimizer holds something else than tensors and numbers."""


def to_tensors(optimizer: torch.optim.Optimizer, *, with_lr: bool = False) -> dict[str, Tensor]:
    """Return the state of an optimizer as named tensors.

    Names are "0/exp_avg" for the state of a parameter, and "group0/step=" for values of a group that differ from the
    optimizer's defaults.

    Args:
        optimizer: the optimizer.
        with_lr: whether to save learning rates: not needed where they are set before every step.

    Raises:
        UnsupportedStateError: The state holds something else than tensors and numbers.
    """
    saved = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    for i, entry in saved["state"].items():
        if not isinstance(i, int):
            raise UnsupportedStateError(f"{i} belongs to no parameter")
        for key, value in entry.items():
            tensors |= _named_tensors(f"{i}/{key}", value)
    for i, group in enumerate(saved["param_groups"]):
        defaults = optimizer.defaults
        for key, value in group.items():
            is_default = key in defaults and _equal(defaults[key], value)
            is_saved = with_lr if key in LR_KEYS else key != "params" and not is_default
            if is_saved:
                tensors |= _named_tensors(f"group{i}/{key}", value)
    return tensors


def from_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load what `to_tensors` returned into an optimizer of the same kind."""
    groups = [_initial_group(group, optimizer.defaults) for group in optimizer.state_dict()["param_groups"]]
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        owner, _, key = name.partition("/")
        value = tensor
        if owner.startswith("group"):
            index = int(owner.removeprefix("group"))
            entry = groups[index]
            value = tensor.to(optimizer.param_groups[index]["params"][0].device)  # torch does it for states only
        else:
            entry = state.setdefault(int(owner), {})
        entry[key.removesuffix(NUMBER_SUFFIX)] = _to_number(value) if key.endswith(NUMBER_SUFFIX) else value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _initial_group(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group as before its first step; this optimizer may have stepped already."""
    fixed = {
        key: value
        for key, value in group.items()
        if key in ("params", *LR_KEYS) or not isinstance(value, int | float | Tensor)
    }
    return fixed | {key: value for key, value in defaults.items() if key not in LR_KEYS}


def _named_tensors(name: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if value is None or _is_text(value):  # names of groups and parameters, which the optimizer has already
        return {}
    if isinstance(value, bool | int | float):
        return {name + NUMBER_SUFFIX: torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)}
    if isinstance(value, tuple):  # betas
        numbers = list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if all(isinstance(number, int | float) for number in numbers):  # pyright: ignore[reportUnknownVariableType]
            return {name + NUMBER_SUFFIX: torch.tensor(numbers, dtype=torch.float64)}
    raise UnsupportedStateError(f"{name} is a {type(value).__name__}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(map(_is_text, value)))  # pyright: ignore


def _to_number(value: Tensor) -> Any:
    number: Any = value.tolist()  # pyright: ignore[reportUnknownMemberType]
    return tuple(number) if isinstance(number, list) else number  # pyright: ignore[reportUnknownArgumentType]


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else type(a) is type(b) and a == b
