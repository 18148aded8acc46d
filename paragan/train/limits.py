"""How a run is watched, and what is done about it: fields of the record. docs/health.md has the reasons."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..config import record

Part = Annotated[float, Field(gt=0, lt=1)]
Times = Annotated[float, Field(gt=1, allow_inf_nan=False)]
Positive = Annotated[int, Field(ge=1)]


def switched(value: Any) -> Any:
    """`--health=off` is a record too."""
    return {"watch": value} if isinstance(value, bool | str) else value


@record
class Health:
    """When a run is said to be ill; relative to what it did before, where no number below is
    absolute (step, accuracy, apart, consensus, roughness).

    watch     : whether anybody looks
    ticks     : for how many ticks in a row a sign must be there (not those of NaN, of steps and of replicas)
    step      : a step of a player changes its weights by so much of their norm
    collapse  : the diversity of fakes within labels falls below this part of what it was
    blow_up   : a loss or a gradient is so many times what it was
    vanish    : a gradient is below this part of what it was
    accuracy  : D tells so many reals from fakes (and its gradient has vanished: it has won)
    apart     : replicas are so far from their mean, relative to its norm
    consensus : ranks that have players of their own (gossip) are so far from their mean
    roughness : the data of one label look like noise: 1 where neighbouring pixels have nothing to do with each other
    """

    watch: bool = True
    ticks: Positive = 3
    step: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    collapse: Part = 0.25
    blow_up: Times = 50.0
    vanish: Part = 0.03
    accuracy: Annotated[float, Field(gt=0.5, le=1)] = 0.99
    apart: Part = 1e-3
    consensus: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.5
    roughness: Part = 0.85


@record
class Guard:
    """What is done where a run is ill: nothing (none), or it goes back to the last good checkpoint (rollback), with
    something changed.

    rollbacks : at most so many; then the run fails
    lr_factor : every time, both learning rates are multiplied by this
    reseed    : whether it then sees other images, latents and labels
    """

    name: Literal["none", "rollback"] = "none"
    rollbacks: Positive = 3
    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    reseed: bool = True

    @property
    def acts(self) -> bool:
        return self.name == "rollback"


AnyHealth = Annotated[Health, BeforeValidator(switched)]
