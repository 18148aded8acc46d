"""`--strategy auto`: another strategy, which is chosen where it is to be played (plan/chosen/auto.py)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from paragan.comm.compression.compressors import Compressor, Exact
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.strategies.base import Role, StrategyDefaults


def _split_commas(value: object) -> object:
    """`sync,sync+int8` is a list too."""
    return tuple(word for word in value.split(",") if word) if isinstance(value, str) else value


@config_class
class Auto(StrategyDefaults):
    """The strategy that is predicted to be fastest on these ranks and links. One worker is profiled, the links are
    measured, and what was chosen is written down with the reasons. On other ranks a run is planned again: it goes on
    with another form of what it was, since a checkpoint follows no further.

    strategies : those that are compared: sync,sync+int8,gossip (none: all that learn one model of all labels)
    margin     : by so much must be faster what gives most up of what one worker would do
    profile    : a file of `paragan bench step`, made on this device (none: measured, or known from before)
    seconds    : about how long to measure one worker
    """

    wire: ClassVar[Compressor] = Exact()
    name: Literal["auto"] = "auto"
    strategies: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = ()
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    profile: str = ""
    measure_s: Annotated[float, Field(ge=1, le=1e5)] = 15.0

    def role(self, game: Game, world: World, lanes: int) -> Role:
        raise UsageError("--strategy auto is chosen when ranks have met; `paragan plan` foresees what it would be")


@config_class
class AutoChoice:
    """That a strategy was chosen: for how many ranks (0: it was not), as it was asked for. Why: the run's `about`."""

    ranks: Annotated[int, Field(ge=0)] = 0
    request: Auto = Auto()
