"""Synchronous training: every rank holds the same two networks and averages gradients with all the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field

from paragan.comm.bucket import Exchange
from paragan.comm.compressed_allreduce import CompressedAllReduce
from paragan.comm.compression.compressors import Compressor, Exact, Wire
from paragan.comm.exchange import Accumulate, AllReduce, LocalSGD, NoExchange, ResetAndSkip, SyncEveryN
from paragan.comm.process_group import Group, SingleRankGroup
from paragan.comm.world import World
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.game.turn import alternating, simultaneous
from paragan.strategies.base import (
    ExchangedPlayer,
    PlayerExchange,
    Role,
    StrategyDefaults,
    TurnOrder,
    assign_lanes,
    make_lockstep_role,
)

Feedback = Annotated[float, Field(ge=0, le=1)] | None
Period = Annotated[int, Field(ge=1, le=1 << 20)]
SyncMode = Literal["parameters", "gradients", "accumulate"]
Order = Literal["alternating", "simultaneous"]
TURN_ORDERS: dict[str, TurnOrder] = {"alternating": alternating, "simultaneous": simultaneous}


def make_gradient_exchange(
    wire: Compressor,
    team: Group,
    feedback: float | None = None,
    sync_period: int = 1,
    weight: float = 1.0,
    sync_mode: SyncMode = "parameters",
) -> Exchange:
    """Return the exchange that averages a gradient over a team. A team of one sends nothing.

    Args:
        feedback: the fraction of what the wire loses that is sent with the next step (None: the wire's own default).
        sync_period: after how many rounds ranks agree.
        weight: this rank's part of the average.
        sync_mode: how they agree if the period is 2 or more (`PeriodicSync`).
    """
    all_reduce = _make_all_reduce(wire, team, feedback)
    if sync_period == 1:
        return all_reduce
    if sync_mode == "accumulate":
        return Accumulate(all_reduce, sync_period, team.size)
    if team.size == 1:
        return ResetAndSkip()
    if sync_mode == "gradients":
        return SyncEveryN(all_reduce, sync_period, weight)
    return LocalSGD(all_reduce, sync_period, weight)


def _make_all_reduce(wire: Compressor, team: Group, feedback: float | None) -> Exchange:
    if team.size == 1:
        return NoExchange()
    if wire.lossy:
        return CompressedAllReduce(wire, team, wire.feedback if feedback is None else feedback)
    return AllReduce(team)


class PeriodicSync(StrategyDefaults):
    """Answers of strategies whose ranks may agree after every `sync_period` rounds only.

    sync_mode says what that means. "parameters": ranks step on their own gradients, and then average parameters (local
    SGD). "gradients": gradients are averaged in the last round of a period; in the others ranks step on their own, and
    parameters are never averaged. "accumulate": gradients are summed over the period, and all ranks take one step with
    their mean.
    """

    sync_period: Period
    sync_mode: SyncMode  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def replicas_drift(self) -> bool:
        return self.sync_period > self.step_period

    @property
    def step_period(self) -> int:
        return self.sync_period if self.sync_mode == "accumulate" else 1

    def accumulating(self, role: Role) -> Role:
        """Return the role with optimizers that step after every period only, if gradients are accumulated."""
        rounds = (role.round, role.round_before_d)
        both = [tuple(tuple(replace(t, step_period=self.step_period) for t in group) for group in r) for r in rounds]
        return replace(role, round=both[0], round_before_d=both[1])


@config_class
class Sync(PeriodicSync):
    """Every rank trains both players against each other and averages gradients with all the others: n ranks give the
    result of one.

    wire        : how gradients are encoded for the network
    feedback    : the fraction of what the wire loses that is sent with the next step (null: the wire's own default)
    sync_period : 2 or more: ranks agree after every so many rounds only
    sync_mode   : how: "parameters" (steps on own gradients, then the mean of parameters: local SGD), "gradients" (the
                  mean of gradients in the last round, own ones in the others) or "accumulate" (one step with the mean
                  of all gradients of the period)
    order       : "alternating" (D, then G) or "simultaneous" (both from the same point)
    """

    name: Literal["sync"] = "sync"
    wire: Wire = Exact()
    feedback: Feedback = None
    sync_period: Period = 1
    sync_mode: SyncMode = "parameters"
    order: Order = "alternating"

    @property
    def supports_batch_ramp(self) -> bool:
        return True

    @property
    def supports_graph_capture(self) -> bool:
        return self.order == "alternating"

    @property
    def supports_late_start(self) -> bool:
        return True

    def on_one_rank(self) -> Self:
        return type(self)()

    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
        metered = world.all_ranks.with_meter(player.meter)
        exchange = make_gradient_exchange(self.wire, metered, self.feedback, self.sync_period, weight, self.sync_mode)
        return PlayerExchange(exchange, SingleRankGroup() if self.replicas_drift else world.all_ranks, weight)

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share = assign_lanes(lanes, world.rank, world.size)
        g, d = (self.player_exchange(player, world, share.weight) for player in game.players)
        return self.accumulating(make_lockstep_role(game, share, (g, d), TURN_ORDERS[self.order], world.size))
