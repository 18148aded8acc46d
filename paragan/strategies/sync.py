"""Synchronous training: every rank holds the same two networks and sums gradients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paragan.comm.bucket import Exchange
from paragan.comm.compressed_allreduce import CompressedSum
from paragan.comm.compression.compressors import Compressor, Exact, Wire
from paragan.comm.exchange import AllReduce, Alone, Local, Periodic
from paragan.comm.process_group import Group, Solo
from paragan.comm.world import World
from paragan.core.schema import record
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.turn import alternately, together
from paragan.strategies.base import Order, Plain, Role, deal, lockstep

Feedback = Annotated[float, Field(ge=0, le=1)] | None
Period = Annotated[int, Field(ge=1, le=1 << 20)]
ORDERS: dict[str, Order] = {"alternately": alternately, "together": together}


def average(
    wire: Compressor, team: Group, feedback: float | None = None, every: int = 1, weight: float = 1.0
) -> Exchange:
    """The exchange that gives everyone in the team the gradient of all its lanes; alone, nothing travels.
    feedback: the share of what the wire loses that is sent later (None: what the wire asks for)
    every   : more than 1: steps on one's own gradient, of which this rank's is `weight`, and a mean in so many steps"""
    if team.size == 1:
        return Local() if every == 1 else Alone()
    kept = wire.feedback if feedback is None else feedback
    each = CompressedSum(wire, team, kept) if wire.lossy else AllReduce(team)
    return each if every == 1 else Periodic(each, every, weight)


@record
class Sync(Plain):
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
    every: Period = 1
    order: Literal["alternately", "together"] = "alternately"

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share, team = deal(lanes, world.rank, world.size), world.everyone

        def exchange(player: Player) -> Exchange:
            return average(self.wire, team.metered(player.meter), self.feedback, self.every, share.weight)

        at_one = self.every == 1 or world.size == 1
        return lockstep(game, team if at_one else Solo(), share, exchange, ORDERS[self.order], replicated=at_one)
