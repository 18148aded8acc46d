"""Synchronous training: every rank holds the same two networks and sums gradients."""

from __future__ import annotations

from typing import Literal

from ..comm.compress import Exact
from ..comm.exchange import AllReduce, Exchange, Local
from ..comm.world import Group, World
from ..config import record
from ..game.game import Game
from ..game.player import Player
from ..game.turn import alternately, together
from .role import Order, Role, deal, lockstep

ORDERS: dict[str, Order] = {"alternately": alternately, "together": together}


def average(wire: Exact, team: Group) -> Exchange:
    """The exchange that gives everyone in the team the gradient of all its lanes."""
    return Local() if team.size == 1 else AllReduce(team)


@record
class Sync:
    """Every rank plays both players against each other and sums gradients with all the others, so that n
    ranks do what one does.

    order : "alternately" (D, then G) or "together" (both from the same point).
    """

    name: Literal["sync"] = "sync"
    wire: Exact = Exact()
    order: Literal["alternately", "together"] = "alternately"

    def role(self, game: Game, world: World, lanes: int) -> Role:
        def exchange(player: Player) -> Exchange:
            return average(self.wire, world.everyone.metered(player.meter))

        return lockstep(game, world.everyone, deal(lanes, world.rank, world.size), exchange, ORDERS[self.order])
