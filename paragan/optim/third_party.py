"""The optimizers of the pytorch-optimizer library, by name: records whose fields are their constructors' arguments.

Which of them can train a game is tried out when a record is built (trial.py).
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
from torch import nn

from paragan.core.errors import UsageError
from paragan.core.schema import config_class, did_you_mean, from_dict
from paragan.optim.compatibility import check_optimizer

# those that treat every number alone, so that a network may be stepped as one vector (tests/optim/test_library.py)
ELEMENTWISE = frozenset(
    {"adabelief", "adabound", "adamax", "ademamix", "adopt", "diffgrad", "lion", "nadam", "radam", "yogi"}
)


def or_third_party(*builtin_names: str) -> WrapValidator:
    """An optimizer may also be one of the library's, where it is none of our `own`."""

    def validate(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        if name in builtin_names or not isinstance(name, str):
            return known(value)
        if not isinstance(value, Mapping):
            return value if all(hasattr(value, word) for word in ("build", "elementwise", "lr")) else known(value)
        if name not in third_party_names():
            raise _validation_error(
                f"there is no {name}{did_you_mean(name, dict.fromkeys([*builtin_names, *third_party_names()]))}"
            )
        try:
            optimizer = from_dict(third_party_config(name), value)
            check_optimizer(optimizer)
        except UsageError as error:
            raise _validation_error(f"{name}: {error}") from error
        return optimizer

    return WrapValidator(validate)


def _validation_error(reason: str) -> PydanticCustomError:
    return PydanticCustomError("optimizer", "{why}", {"why": reason})


@cache
def third_party_names() -> tuple[str, ...]:
    """All that the library has."""
    return tuple(_import_library().get_supported_optimizers())


@cache
def third_party_config(name: str) -> type:
    """The record of one: its fields are the arguments that have a number, a word or a tuple as default."""
    given = inspect.signature(_import_library().load_optimizer(name)).parameters.values()
    defaults = {a.name: a.default for a in given if type(a.default) in (bool, int, float, str, tuple)}
    types = {"name": Literal[name]} | {field: _field_type(field, default) for field, default in defaults.items()}
    body = {"__annotations__": types, "name": name, "build": _build_optimizer, "elementwise": name in ELEMENTWISE}
    return config_class(type(name, (), body | defaults))


def _field_type(name: str, default: Any) -> Any:
    if name == "lr":
        return Annotated[float, Field(gt=0, allow_inf_nan=False)]
    if isinstance(default, tuple):
        return tuple[float, ...]
    if type(default) in (int, float) and math.isfinite(default):  # a rate may have the default 0
        finite = Annotated[float, Field(allow_inf_nan=False)]
        return int | finite if type(default) is int else finite
    return type(default)


def _build_optimizer(self: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "name"}
    return _import_library().load_optimizer(self.name)(parameters, **arguments)


@cache
def _import_library() -> Any:
    """It takes two seconds to import, so only who asks for one of its optimizers does."""
    import pytorch_optimizer

    return pytorch_optimizer
