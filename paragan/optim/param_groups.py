"""Parameter groups: parameters of a player that are selected by name and are trained in a way of their own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.core.schema import config_class


@config_class
class ParamGroup:
    """Parameters whose names match a pattern, and how they are trained.

    pattern          : of their names, such as encoder.* or *.bias; * stands for any characters, dots too
    lr_factor        : factor on the player's learning rate
    weight_decay     : their weight decay; None: that of the player's optimizer
    freeze_from_kimg : from then on they do not change; None: never
    """

    pattern: Annotated[str, Field(min_length=1)]
    lr_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    freeze_from_kimg: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


@dataclass(frozen=True)
class SelectedParameters:
    """The parameters of one group of an optimizer.

    names              : of the parameters
    options            : the optimizer's options of this group: lr, and weight_decay if it differs
    freeze_from_images : after so many images they do not change; None: they always do
    """

    names: frozenset[str]
    options: Mapping[str, float]
    freeze_from_images: float | None


def select_parameters(
    section: str,
    groups: Sequence[ParamGroup],
    decay_norms_and_biases: bool,
    lr: float,
    parameters: Mapping[str, Tensor],
) -> list[SelectedParameters]:
    """Divide the parameters of a player among the groups of its optimizer: those of no group come first.

    A parameter belongs to the first group whose pattern matches its name.

    Args:
        section: of the run that has the groups, "g" or "d".
        groups: the groups.
        decay_norms_and_biases: false: parameters of fewer than two dimensions get no weight decay.
        lr: the player's learning rate.
        parameters: those that are trained, by name.

    Raises:
        UsageError: nothing is left for a pattern.
    """
    owners = {name: _first_match(groups, name) for name in parameters}
    for i in range(len(groups)):
        if i not in owners.values():
            raise UsageError(_describe_unmatched(section, groups, i, list(parameters)))
    selected: list[SelectedParameters] = []
    for i in (None, *range(len(groups))):
        group = ParamGroup("*") if i is None else groups[i]
        names = [name for name, owner in owners.items() if owner == i]
        undecayed = [name for name in names if not decay_norms_and_biases and parameters[name].dim() < 2]
        decayed = [name for name in names if name not in undecayed]
        freeze_from = None if group.freeze_from_kimg is None else 1000 * group.freeze_from_kimg
        for part, weight_decay in ((decayed, group.weight_decay), (undecayed, 0.0)):
            options = {"lr": lr * group.lr_factor}
            if weight_decay is not None:
                options["weight_decay"] = weight_decay
            if part:
                selected.append(SelectedParameters(frozenset(part), options, freeze_from))
    return selected


def _first_match(groups: Sequence[ParamGroup], name: str) -> int | None:
    return next((i for i, group in enumerate(groups) if fnmatchcase(name, group.pattern)), None)


def _describe_unmatched(section: str, groups: Sequence[ParamGroup], i: int, names: Sequence[str]) -> str:
    """Return a message about a group that no parameter belongs to."""
    pattern = groups[i].pattern
    matched = next((name for name in names if fnmatchcase(name, pattern)), None)
    if matched:
        earlier = groups[_first_match(groups, matched) or 0].pattern
        return (
            f"{section}.groups.{i}.pattern={pattern}: all that it matches belongs to the group {earlier} before it. "
            f"Put {pattern} first"
        )
    nearest = _nearest_pattern(pattern, names)
    return f"{section}.groups.{i}.pattern={pattern}: matches no trained parameter of {section.upper()}. Use {nearest}"


def _nearest_pattern(pattern: str, names: Sequence[str]) -> str:
    """Return the name of a parameter, or of a module followed by .*, that is most like a pattern."""
    modules: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        modules |= {".".join([*parts[:i], "*"]): None for i in range(1, len(parts))}
    choices = [*modules, *names]
    return max(choices, key=lambda choice: difflib.SequenceMatcher(None, pattern, choice).ratio())


def optimizer_field(optimizer: Any, name: str) -> str | None:
    """Return the dotted field of this name of an optimizer config or of the one inside; None if there is none."""
    if hasattr(optimizer, name):
        return name
    inner = getattr(optimizer, "inner", None)
    return f"inner.{name}" if hasattr(inner, name) else None
