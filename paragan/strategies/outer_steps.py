"""The fields of an outer optimizer (comm/outer_optimizer.py) that several strategies have, and what they go with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from paragan.comm.bucket import Exchange
from paragan.comm.outer_optimizer import AnyOuter, OuterOptimizer, OuterSteps
from paragan.core.errors import UsageError
from paragan.strategies.base import StrategyDefaults

Period = Annotated[int, Field(ge=1, le=1 << 20)]
Fragments = Annotated[int, Field(ge=1, le=1 << 10)]
Delay = Annotated[int, Field(ge=0)]
SUGGESTED_PERIOD = 16  # in messages


class WithOuterOptimizer(StrategyDefaults):
    """Answers of strategies whose ranks take outer steps after every `sync_period` rounds."""

    sync_period: Period
    outer: AnyOuter
    outer_d: AnyOuter | None
    fragments: Fragments
    delay: Delay

    @property
    def outer_is_mean(self) -> bool:
        return self.outer_steps(0).is_mean and self.outer_steps(1).is_mean

    @property
    def has_outer_of_d(self) -> bool:
        return self.outer_d is not None

    @property
    def num_fragments(self) -> int:
        return self.fragments

    @property
    def rounds_in_flight(self) -> int:
        return self.delay

    @property
    def sends_in(self) -> tuple[int, ...]:
        steps = (self.outer_steps(0), self.outer_steps(1))
        return tuple(sorted({each.phase(fragment) for each in steps for fragment in range(self.fragments)}))

    def outer_steps(self, player: int) -> OuterSteps:
        """Return the outer steps of a player: that of an odd number is a D."""
        outer = self.outer_d if self.outer_d and player % 2 else self.outer
        return OuterSteps(self.sync_period, outer.lr, outer.momentum, self.fragments, self.delay, player)

    def check_outer(self, *, paper_update: bool = False) -> None:
        """Raise UsageError if the fields of the outer optimizer do not fit the other ones, or each other."""
        outer_d = self.outer_d.name if self.outer_d else None
        fields = {
            f"strategy.outer={self.outer.name}": (self.outer.name != "mean", "strategy.outer=mean"),
            f"strategy.outer_d={outer_d}": (outer_d is not None, "strategy.outer_d=null"),
            f"strategy.fragments={self.fragments}": (self.fragments > 1, "strategy.fragments=1"),
            f"strategy.delay={self.delay}": (self.delay > 0, "strategy.delay=0"),
        }
        for field, (is_used, default) in fields.items():
            if is_used:
                self._check_averages_parameters(field, default, paper_update)
        period = self.sync_period
        if self.fragments > period:
            raise UsageError(
                f"strategy.fragments={self.fragments}: each is sent in a round of its own, and strategy.sync_period="
                f"{period}. Use strategy.fragments={period} or less, or strategy.sync_period={self.fragments} or more"
            )
        if self.delay and self.delay >= period:
            raise UsageError(
                f"strategy.delay={self.delay}: must be below strategy.sync_period={period}, after which the next "
                f"step is sent. Use strategy.delay={period - 1} or less, or strategy.sync_period={self.delay + 1} or "
                "more"
            )

    def _check_averages_parameters(self, field: str, default: str, paper_update: bool) -> None:
        """Raise UsageError if parameters are not averaged after every period, which is where outer steps are taken."""
        period = max(SUGGESTED_PERIOD, self.fragments, self.delay + 1)
        if paper_update:
            raise UsageError(
                f"{field}: the paper's update averages gradients in every step. Use strategy.paper_update=false with "
                f"strategy.sync_period={period}, or {default}"
            )
        if self.sync_mode != "parameters":
            raise UsageError(
                f"{field}: steps on the mean of parameters, and strategy.sync_mode={self.sync_mode}. Use "
                f"strategy.sync_mode=parameters, or {default}"
            )
        if self.sync_period == 1:
            raise UsageError(
                f"{field}: has no effect with strategy.sync_period=1. Use strategy.sync_period={period}, or {default}"
            )


def outer_drain(exchange: Exchange) -> Callable[[], None] | None:
    """Return what receives the messages that are in flight between rounds; None if there are none."""
    return exchange.drain if isinstance(exchange, OuterOptimizer) and exchange.steps.delay else None
