"""`--strategy auto`: stands for a strategy that is chosen on the ranks that run it (plan/select/choose.py)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field

from paragan.comm.compression.compressors import Compressor, Exact
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.strategies.base import Role, StrategyDefaults


def _split_commas(value: object) -> object:
    """Accept `sync,sync+int8` as a list."""
    return tuple(word for word in value.split(",") if word) if isinstance(value, str) else value


@config_class
class Auto(StrategyDefaults):
    """The strategy that is predicted to be fastest on these ranks and links. One worker is profiled, the links are
    measured, and the choice is written to run.yaml with its reasons. On another number of ranks the choice is made
    again, among the strategies that can resume from the checkpoint.

    strategies : the strategies to compare: sync,sync+int8,gossip (empty: all that train one model of all labels)
    margin     : how much faster a strategy has to be that is not equivalent to training on one worker
    profile    : a file of `paragan bench step`, made on this device (empty: measured, or taken from the cache)
    measure_s  : about how many seconds to measure one worker
    """

    name: Literal["auto"] = "auto"
    strategies: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = ()
    margin: Annotated[float, Field(ge=0, lt=1)] = 0.05
    profile: str = ""
    measure_s: Annotated[float, Field(ge=1, le=1e5)] = 15.0

    @property
    def wire(self) -> Compressor:
        return Exact()

    @property
    def sync_period(self) -> int:
        return 1

    @property
    def auto_request(self) -> Self:
        return self

    def role(self, game: Game, world: World, lanes: int) -> Role:
        raise UsageError(
            "strategy=auto: the strategy is chosen when all ranks have connected. Use `paragan plan` to see the choice."
        )


@config_class
class AutoChoice:
    """How a strategy was chosen. The reasons are in the run's `reasons`.

    ranks   : the number of ranks it was chosen for (0: it was not chosen)
    request : the `auto` strategy that was asked for
    """

    ranks: Annotated[int, Field(ge=0)] = 0
    request: Auto = Auto()
