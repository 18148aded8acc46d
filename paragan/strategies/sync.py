"""Synchronous training: every rank holds the same two networks and averages gradients with all the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field

from paragan.comm.bucket import Exchange
from paragan.comm.compressed_allreduce import CompressedAllReduce
from paragan.comm.compression.compressors import Compressor, Exact, Wire
from paragan.comm.exchange import Accumulate, AllReduce, NoExchange, ResetAndSkip, SyncEveryN
from paragan.comm.outer_optimizer import AnyOuter, OuterMean, OuterOptimizer, OuterSteps
from paragan.comm.process_group import Group, SingleRankGroup
from paragan.comm.reduce_scatter import ReduceScatter
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.game.turn import alternating, simultaneous
from paragan.strategies.base import (
    ExchangedPlayer,
    MinRanks,
    PeerTimeout,
    PlayerExchange,
    ReplaysBrokenRounds,
    Role,
    StrategyDefaults,
    TurnOrder,
    assign_lanes,
    make_lockstep_role,
)
from paragan.strategies.outer_steps import Delay, Fragments, Period, WithOuterOptimizer, outer_drain

Feedback = Annotated[float, Field(ge=0, le=1)] | None
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
    outer: OuterSteps | None = None,
    shard_optimizer: bool = False,
) -> Exchange:
    """Return the exchange that averages a gradient over a team. A team of one sends nothing.

    Args:
        feedback: the fraction of what the wire loses that is sent with the next step (None: the wire's own default).
        sync_period: after how many rounds ranks agree.
        weight: this rank's part of the average.
        sync_mode: how they agree if the period is 2 or more (`PeriodicSync`).
        outer: the outer optimizer where parameters are averaged (None: their mean).
        shard_optimizer: whether a rank gets the average for its own part only.
    """
    is_sharded = shard_optimizer and team.size > 1
    all_reduce = ReduceScatter(team) if is_sharded else _make_all_reduce(wire, team, feedback)
    if sync_period == 1:
        return all_reduce
    if sync_mode == "accumulate":
        return Accumulate(all_reduce, sync_period, team.size)
    outer = outer or OuterSteps(sync_period)
    if team.size == 1 and outer.is_mean:
        return ResetAndSkip()
    if sync_mode == "gradients":
        return SyncEveryN(all_reduce, sync_period, weight)
    return OuterOptimizer(all_reduce, weight, outer, hops=2 if wire.lossy else 1)


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
class Sync(ReplaysBrokenRounds, PeriodicSync, WithOuterOptimizer):
    """Every rank trains both players against each other and averages gradients with all the others: n ranks give the
    result of one.

    wire            : how gradients are encoded for the network
    feedback        : the fraction of what the wire loses that is sent with the next step (null: the wire's own default)
    sync_period     : 2 or more: ranks agree after every so many rounds only
    sync_mode       : how: "parameters" (steps on own gradients, then the mean of parameters: local SGD), "gradients"
                      (the mean of gradients in the last round, own ones in the others) or "accumulate" (one step with
                      the mean of all gradients of the period)
    outer           : the step on what ranks have changed in a period: "mean" (of their parameters) or "nesterov"
                      (DiLoCo)
    outer_d         : that of D (null: as outer)
    fragments       : parts of a player that are sent in rounds of their own, those of G and D in turns (Streaming
                      DiLoCo); 1: all at once
    delay           : rounds from sending to applying; ranks train on meanwhile
    order           : "alternating" (D, then G) or "simultaneous" (both from the same point)
    shard_optimizer : whether each rank keeps the optimizer state and the average of its part of the parameters only
                      (ZeRO-1)
    peer_timeout_s  : above 0: the others go on without a rank that died, or that is silent for so long; 0: the run ends
                      with the first lost rank (docs/lost_ranks.md)
    min_ranks       : with fewer ranks left, they stop with a checkpoint; 1: the last one goes on if all others have
                      exited
    """

    name: Literal["sync"] = "sync"
    wire: Wire = Exact()
    feedback: Feedback = None
    sync_period: Period = 1
    sync_mode: SyncMode = "parameters"  # pyright: ignore[reportIncompatibleMethodOverride]
    outer: AnyOuter = OuterMean()
    outer_d: AnyOuter | None = None
    fragments: Fragments = 1
    delay: Delay = 0
    order: Order = "alternating"
    shard_optimizer: bool = False  # pyright: ignore[reportIncompatibleMethodOverride]
    peer_timeout_s: PeerTimeout = 0.0
    min_ranks: MinRanks = 2

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
        return type(self)() if all(self.outer_steps(player).is_mean for player in (0, 1)) else self

    def check(self, ranks: int) -> None:
        self.check_outer()
        self.check_rank_loss(
            sync_mode=self.sync_mode == "parameters",
            shard_optimizer=not self.shard_optimizer,
            fragments=self.fragments == 1,
            delay=self.delay == 0,
        )
        if self.shard_optimizer:
            self._check_sharded()

    def _check_sharded(self) -> None:
        if self.wire.lossy:
            raise UsageError(
                f"strategy.shard_optimizer=true: sums gradients as they are, and strategy.wire={self.wire.name} loses "
                "some of them. Use --strategy.wire=exact, or --strategy.shard_optimizer=false."
            )
        if self.replicas_drift:
            raise UsageError(
                f"strategy.shard_optimizer=true: with strategy.sync_period={self.sync_period} and strategy.sync_mode="
                f"{self.sync_mode} each rank steps all parameters. Use --strategy.sync_mode=accumulate, "
                "--strategy.sync_period=1, or --strategy.shard_optimizer=false."
            )

    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
        metered = world.all_ranks.with_meter(player.meter)
        outer = self.outer_steps(player.number)
        exchange = make_gradient_exchange(
            self.wire, metered, self.feedback, self.sync_period, weight, self.sync_mode, outer, self.shard_optimizer
        )
        team = SingleRankGroup() if self.replicas_drift else world.all_ranks
        return PlayerExchange(exchange, team, weight, drain=outer_drain(exchange))

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share = assign_lanes(lanes, world.rank, world.size)
        if self.shard_optimizer and world.size > 1:
            for player in game.players:
                player.shard(world.all_ranks)
        g, d = (self.player_exchange(player, world, share.weight) for player in game.players)
        return self.accumulating(make_lockstep_role(game, share, (g, d), TURN_ORDERS[self.order], world.size))
