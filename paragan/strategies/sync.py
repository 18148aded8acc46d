"""Synchronous training: every rank holds the same two networks and averages gradients with all the others."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field

from paragan.comm.bucket import Exchange
from paragan.comm.compressed_allreduce import CompressedAllReduce
from paragan.comm.compression.compressors import Compressor, Exact, Wire
from paragan.comm.exchange import AllReduce, LocalSGD, NoExchange, ResetAndSkip
from paragan.comm.process_group import Group, SingleRankGroup
from paragan.comm.world import World
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.turn import alternating, simultaneous
from paragan.strategies.base import Role, StrategyDefaults, TurnOrder, assign_lanes, make_lockstep_role

Feedback = Annotated[float, Field(ge=0, le=1)] | None
Period = Annotated[int, Field(ge=1, le=1 << 20)]
Order = Literal["alternating", "simultaneous"]
TURN_ORDERS: dict[str, TurnOrder] = {"alternating": alternating, "simultaneous": simultaneous}


def make_gradient_exchange(
    wire: Compressor, team: Group, feedback: float | None = None, sync_period: int = 1, weight: float = 1.0
) -> Exchange:
    """Return the exchange that averages a gradient over a team. A team of one sends nothing.

    Args:
        feedback: the fraction of what the wire loses that is sent with the next step (None: the wire's own default).
        sync_period: at 2 or more, ranks step on their own gradients and average their parameters every so many steps.
        weight: this rank's part of that average.
    """
    if team.size == 1:
        return NoExchange() if sync_period == 1 else ResetAndSkip()
    if wire.lossy:
        all_reduce = CompressedAllReduce(wire, team, wire.feedback if feedback is None else feedback)
    else:
        all_reduce = AllReduce(team)
    return all_reduce if sync_period == 1 else LocalSGD(all_reduce, sync_period, weight)


@config_class
class Sync(StrategyDefaults):
    """Every rank trains both players against each other and averages gradients with all the others: n ranks give the
    result of one.

    wire        : how gradients are encoded for the network
    feedback    : the fraction of what the wire loses that is sent with the next step (null: the wire's own default)
    sync_period : 2 or more: ranks step on their own gradients, and average parameters every so many steps (local SGD)
    order       : "alternating" (D, then G) or "simultaneous" (both from the same point)
    """

    name: Literal["sync"] = "sync"
    wire: Wire = Exact()
    feedback: Feedback = None
    sync_period: Period = 1
    order: Order = "alternating"

    @property
    def supports_batch_ramp(self) -> bool:
        return True

    @property
    def supports_graph_capture(self) -> bool:
        return self.order == "alternating"

    def on_one_rank(self) -> Self:
        return type(self)()

    def role(self, game: Game, world: World, lanes: int) -> Role:
        team = world.all_ranks
        share = assign_lanes(lanes, world.rank, world.size)
        is_replicated = self.sync_period == 1 or world.size == 1

        def make_exchange(player: Player) -> Exchange:
            metered = team.with_meter(player.meter)
            return make_gradient_exchange(self.wire, metered, self.feedback, self.sync_period, share.weight)

        return make_lockstep_role(
            game,
            team if is_replicated else SingleRankGroup(),
            share,
            make_exchange,
            TURN_ORDERS[self.order],
            replicated=is_replicated,
        )
