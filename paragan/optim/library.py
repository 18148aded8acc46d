"""The optimizers of the pytorch-optimizer library, by name: records whose fields are their constructors' arguments.

Which of them can train a game is tried out when a record is built: they must step on a gradient alone, on parameters of
any shape, and go on exactly from what a checkpoint has of them.
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import PydanticCustomError
from torch import nn

from ..config import build, nearest, record
from ..errors import Unusable
from . import state

# those that treat every number alone, so that a network may be stepped as one vector (tests/optim/test_library.py)
ELEMENTWISE = frozenset(
    {"adabelief", "adabound", "adamax", "ademamix", "adopt", "diffgrad", "lion", "nadam", "radam", "yogi"}
)
SHAPES = ((6, 4), (4,), (3, 2, 3, 3), ())  # of the parameters an optimizer is tried on


def or_library(*own: str) -> WrapValidator:
    """An optimizer may also be one of the library's, where it is none of our `own`."""

    def part(value: Any, known: ValidatorFunctionWrapHandler) -> Any:
        name = value.get("name") if isinstance(value, Mapping) else getattr(value, "name", None)
        if name in own or not isinstance(name, str):
            return known(value)
        if not isinstance(value, Mapping):
            return value
        if name not in names():
            raise _refusal(f"there is no {name}{nearest(name, [*own, *names()])}")
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
    return int | float if type(default) is int else type(default)  # of a rate whose default is 0, too


def _build(self: Any, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    arguments = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "name"}
    return _library().load_optimizer(self.name)(parameters, **arguments)


@cache
def _library() -> Any:
    """It takes two seconds to import, so only who asks for one of its optimizers does."""
    import pytorch_optimizer

    return pytorch_optimizer


# what is tried --------------------------------------------------------------------------------------------------------


def prove(optimizer: Any) -> None:
    """Unusable where it cannot step on gradients alone, or not go on exactly from what a checkpoint has of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # many say in a warning what they lack
            once, (again, before) = _Trial(optimizer), (_Trial(optimizer), _Trial(optimizer))
            once.play(11)
            before.play(7)
            again.go_on_from(before)
            again.play(4)
    except state.NotTensors as error:
        raise Unusable(f"what it keeps cannot be in a checkpoint ({error})") from error
    except Exception as error:
        raise Unusable(f"it cannot train a game: {type(error).__name__}: {error}") from error
    if hasattr(once.optimizer, "train") and hasattr(once.optimizer, "eval"):
        raise Unusable("it keeps the weights to use apart from those it steps, and G's average follows the latter")
    if not all(torch.equal(p, q) for p, q in zip(once.parameters, again.parameters)):
        raise Unusable("it does not go on exactly from what a checkpoint has of it")


class _Trial:
    """A few parameters, and gradients that follow from where they are."""

    def __init__(self, optimizer: Any):
        draw = torch.Generator().manual_seed(0)
        values = (torch.randn(shape, generator=draw) for shape in SHAPES)
        layouts = {4: torch.channels_last}
        self.parameters = [
            nn.Parameter(v.contiguous(memory_format=layouts.get(v.dim(), torch.contiguous_format))) for v in values
        ]
        self.optimizer: torch.optim.Optimizer = optimizer.build(self.parameters)
        self.steps = 0

    def play(self, steps: int) -> None:
        for _ in range(steps):
            self.steps += 1
            for p in self.parameters:
                p.grad = torch.sin(3 * p.detach() + self.steps)
            self.optimizer.step()

    def go_on_from(self, other: _Trial) -> None:
        with torch.no_grad():
            for p, q in zip(self.parameters, other.parameters):
                p.copy_(q)
        self.steps = other.steps
        kept = {name: tensor.clone() for name, tensor in state.to_tensors(other.optimizer).items()}
        state.from_tensors(self.optimizer, kept)
