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

from paragan.core.errors import Unusable
from paragan.core.schema import build, nearest, record
from paragan.optim.compatibility import prove

# those that treat every number alone, so that a network may be stepped as one vector (tests/optim/test_library.py)
ELEMENTWISE = frozenset(
    {"adabelief", "adabound", "adamax", "ademamix", "adopt", "diffgrad", "lion", "nadam", "radam", "yogi"}
)


def or_library(*own: str) -> WrapValidator:
    """An optimizer may also be one of the library's, where it is none of our `own`."""

    def part(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        if name in own or not isinstance(name, str):
            return known(value)
        if not isinstance(value, Mapping):
            return value if all(hasattr(value, word) for word in ("build", "elementwise", "lr")) else known(value)
        if name not in names():
            raise _refusal(f"there is no {name}{nearest(name, dict.fromkeys([*own, *names()]))}")
        try:
            optimizer = build(kind(name), value)
            prove(optimizer)
        except Unusable as error:
            raise _refusal(f"{name}: {error}") from error
        return optimizer

    return WrapValidator(part)


def _refusal(why: str) -> PydanticCustomError:
    return PydanticCustomError("optimizer", "{why}", {"why": why})


@cache
def names() -> tuple[str, ...]:
    """All that the library has."""
    return tuple(_library().get_supported_optimizers())


@cache
def kind(name: str) -> type:
    """The record of one: its fields are the arguments that have a number, a word or a tuple as default."""
    given = inspect.signature(_library().load_optimizer(name)).parameters.values()
    defaults = {a.name: a.default for a in given if type(a.default) in (bool, int, float, str, tuple)}
    types = {"name": Literal[name]} | {field: _type(field, default) for field, default in defaults.items()}
    body = {"__annotations__": types, "name": name, "build": _build, "elementwise": name in ELEMENTWISE}
    return record(type(name, (), body | defaults))


def _type(name: str, default: Any) -> Any:
    if name == "lr":
        return Annotated[float, Field(gt=0, allow_inf_nan=False)]
    if isinstance(default, tuple):
        return tuple[float, ...]
    if type(default) in (int, float) and math.isfinite(default):  # a rate may have the default 0
        finite = Annotated[float, Field(allow_inf_nan=False)]
        return int | finite if type(default) is int else finite
    return type(default)


def _build(self: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "name"}
    return _library().load_optimizer(self.name)(parameters, **arguments)


@cache
def _library() -> Any:
    """It takes two seconds to import, so only who asks for one of its optimizers does."""
    import pytorch_optimizer

    return pytorch_optimizer
