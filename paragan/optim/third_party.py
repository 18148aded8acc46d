"""The optimizers of the pytorch-optimizer library by name: configs whose fields are the constructor's arguments.

Whether one can train a game is checked when its config is built (`optim/compatibility.py`). Optimizers that take norms
of whole layers need the same number of threads on all ranks (`device.threads`); otherwise replicas drift apart by
rounding.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError

from paragan.core.errors import UsageError
from paragan.core.schema import config_class, did_you_mean, from_dict
from paragan.optim.compatibility import check_optimizer

# Those that treat every number by itself, so that a network can be stepped as one flat vector. A test checks them.
ELEMENTWISE = frozenset(
    {"adabelief", "adabound", "adamax", "ademamix", "adopt", "diffgrad", "lion", "nadam", "radam", "yogi"}
)


def or_third_party(*builtin_names: str) -> WrapValidator:
    """Return a validator that also accepts optimizers of the library; `builtin_names` are those of paragan."""

    def validate(value: Any, validate_builtin: ValidatorFunctionWrapHandler) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        if name in builtin_names or not isinstance(name, str):
            return validate_builtin(value)
        if not isinstance(value, Mapping):
            is_optimizer = all(hasattr(value, attribute) for attribute in ("build", "elementwise", "lr"))
            return value if is_optimizer else validate_builtin(value)
        if name not in third_party_names():
            names = dict.fromkeys([*builtin_names, *third_party_names()])
            raise _validation_error(f"there is no {name}{did_you_mean(name, names)}")
        try:
            optimizer = from_dict(third_party_config(name), value)
            check_optimizer(optimizer)
        except UsageError as error:
            raise _validation_error(f"{name}: {error}") from error
        return optimizer

    return WrapValidator(validate)


def _validation_error(reason: str) -> PydanticCustomError:
    return PydanticCustomError("optimizer", "{reason}", {"reason": reason})


@cache
def third_party_names() -> tuple[str, ...]:
    """Return the names of all optimizers of the library."""
    return tuple(_import_library().get_supported_optimizers())


@cache
def third_party_config(name: str) -> type:
    """Return the config class of an optimizer: a field for each argument with a number, string or tuple as default."""
    arguments = inspect.signature(_import_library().load_optimizer(name)).parameters.values()
    defaults = {a.name: a.default for a in arguments if type(a.default) in (bool, int, float, str, tuple)}
    types = {"name": Literal[name]} | {field: _field_type(field, default) for field, default in defaults.items()}
    body = {"__annotations__": types, "name": name, "build": _build_optimizer, "elementwise": name in ELEMENTWISE}
    return config_class(type(name, (), body | defaults))


def _field_type(name: str, default: Any) -> Any:
    if name == "lr":
        return Annotated[float, Field(gt=0, allow_inf_nan=False)]
    if isinstance(default, tuple):
        return tuple[float, ...]
    if type(default) in (int, float) and math.isfinite(default):  # the default 0 may be of a float argument
        finite = Annotated[float, Field(allow_inf_nan=False)]
        return int | finite if type(default) is int else finite
    return type(default)


def _build_optimizer(self: Any, parameters: list[Any]) -> torch.optim.Optimizer:
    arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "name"}
    return _import_library().load_optimizer(self.name)(parameters, **arguments)


@cache
def _import_library() -> Any:
    """Import the library, which takes two seconds, only when one of its optimizers is used."""
    import pytorch_optimizer

    return pytorch_optimizer
