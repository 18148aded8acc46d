"""Synchronous training: every rank holds the same two networks and sums gradients."""

from __future__ import annotations

from typing import Annotated, Literal

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
TURN_ORDERS: dict[str, TurnOrder] = {"alternately": alternating, "together": simultaneous}


def make_gradient_exchange(
    wire: Compressor, team: Group, feedback: float | None = None, sync_period: int = 1, weight: float = 1.0
) -> Exchange:
    """The exchange that gives everyone in the team the gradient of all its lanes; alone, nothing travels.
    feedback: the share of what the wire loses that is sent later (None: what the wire asks for)
    every   : more than 1: steps on one's own gradient, of which this rank's is `weight`, and a mean in so many steps"""
    if team.size == 1:
        return NoExchange() if sync_period == 1 else ResetAndSkip()
    kept = wire.feedback if feedback is None else feedback
    each = CompressedAllReduce(wire, team, kept) if wire.lossy else AllReduce(team)
    return each if sync_period == 1 else LocalSGD(each, sync_period, weight)


@config_class
class Sync(StrategyDefaults):
    """Every rank plays both players against each other and sums gradients with all the others, so that n
    ranks do what one does.

    wire     : the form gradients travel in
    feedback : the share of what the wire loses that is sent with the next step (None: what the wire asks for)
    every    : 2 or more: ranks step on their own gradients, and go on from their mean every so many steps
    order    : "alternately" (D, then G) or "together" (both from the same point).
    """

    name: Literal["sync"] = "sync"
    wire: Wire = Exact()
    feedback: Feedback = None
    sync_period: Period = 1
    order: Literal["alternately", "together"] = "alternately"

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share, team = assign_lanes(lanes, world.rank, world.size), world.all_ranks

        def make_exchange(player: Player) -> Exchange:
            return make_gradient_exchange(
                self.wire, team.with_meter(player.meter), self.feedback, self.sync_period, share.weight
            )

        at_one = self.sync_period == 1 or world.size == 1
        return make_lockstep_role(
            game,
            team if at_one else SingleRankGroup(),
            share,
            make_exchange,
            TURN_ORDERS[self.order],
            replicated=at_one,
        )
