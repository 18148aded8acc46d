"""Synchronous training: every rank holds the same two networks and sums gradients."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..comm.compress import Compressor, Exact, Wire
from ..comm.exchange import AllReduce, CompressedSum, Exchange, Local
from ..comm.groups import Group
from ..comm.world import World
from ..config import record
from ..game.game import Game
from ..game.player import Player
from ..game.turn import alternately, together
from .role import Order, Plain, Role, deal, lockstep

Feedback = Annotated[float, Field(ge=0, le=1)] | None
ORDERS: dict[str, Order] = {"alternately": alternately, "together": together}


def average(wire: Compressor, team: Group, feedback: float | None = None) -> Exchange:
    """The exchange that gives everyone in the team the gradient of all its lanes; alone, nothing travels.
    feedback: the share of what the wire loses that is sent later (None: what the wire asks for)."""
    if team.size == 1:
        return Local()
    kept = wire.feedback if feedback is None else feedback
    return CompressedSum(wire, team, kept) if wire.lossy else AllReduce(team)


@record
class Sync(Plain):
    """Every rank plays both players against each other and sums gradients with all the others, so that n
    ranks do what one does.

    wire     : the form gradients travel in
    feedback : the share of what the wire loses that is sent with the next step (None: what the wire asks for)
    order    : "alternately" (D, then G) or "together" (both from the same point).
    """

    name: Literal["sync"] = "sync"
    wire: Wire = Exact()
    feedback: Feedback = None
    order: Literal["alternately", "together"] = "alternately"

    def role(self, game: Game, world: World, lanes: int) -> Role:
        def exchange(player: Player) -> Exchange:
            return average(self.wire, world.everyone.metered(player.meter), self.feedback)

        return lockstep(game, world.everyone, deal(lanes, world.rank, world.size), exchange, ORDERS[self.order])
