"""Decentralized training: no rank waits for all; each mixes its players with those of a few neighbours.

Liu, Zhang, Mroueh, Cui, Ross, Yang and Das, "A Decentralized Parallel Algorithm for Training Generative Adversarial
Nets" (DPOSG), NeurIPS 2020, arXiv 1910.12999.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..comm import topology as graphs
from ..comm.compress import Exact, Wire
from ..comm.exchange import Every, Exchange, Local, Lookahead, Now, Then
from ..comm.gossip import CompressedGossip, Gossip
from ..comm.topology import OnePeer, RandomRing, Ring, Topologies, Topology, rounds_for
from ..comm.world import Group, Solo, World
from ..config import record
from ..errors import Unusable
from ..game.game import Game
from ..game.player import Player
from .quantized import CPOAdam
from .role import Optimistic, Role, deal, lockstep
from .sync import ORDERS


@record
class Decentralized(Optimistic):
    """Both players move at once, optimistically, each rank on its own gradient; parameters travel to neighbours
    while it is computed, and are mixed before the step.

    topology    : who hears whom
    rounds      : how often parameters are mixed in a step
    consensus   : instead of rounds: as many as leave this share of the distance between ranks
    local_steps : mix only at the end of so many steps (local SGDA)
    wire        : the form parameters travel in; over a lossy one, what travels is how they changed (CHOCO)
    rate        : how far a mix over a lossy wire goes, 1 all the way; wires that lose much need less
    exact       : the paper's own update: mixed first, then optimistic mirror descent with each player's learning rate
    lost_after_s: a rank that is silent for so long is left out, and the others go on; 0: the run ends with it. A rank
                  that died is left out at once. On CPU, with ranks started one by one (docs/gossip.md)
    """

    name: Literal["gossip"] = "gossip"
    topology: Topologies = OnePeer()
    rounds: Annotated[int, Field(ge=1)] = 1
    consensus: Annotated[float, Field(gt=0, lt=1)] | None = None
    local_steps: Annotated[int, Field(ge=1)] = 1
    wire: Wire = Exact()
    rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    order: Literal["alternately", "together"] = "together"
    exact: bool = False
    lost_after_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0

    def check(self, ranks: int) -> None:
        graphs.check(self.topology, ranks)
        if 0 < self.lost_after_s < 1:
            raise Unusable(f"strategy.lost_after_s={self.lost_after_s:g} must be 1 or more, or 0: never go on without")

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share, size = deal(lanes, world.rank, world.size), world.size
        topology = graphs.among(self.topology, world.seats, world.began)

        def exchange(player: Player) -> Exchange:
            mixing = Every(self._mixing(topology, world.everyone.metered(player.meter)), self.local_steps)
            return Then(Now(mixing), Lookahead(Local(), lambda: player.learning_rate)) if self.exact else mixing

        # a rank's gradient is the mean over its own lanes; where ranks own unequally many, those of more weigh more
        return lockstep(
            game, Solo(), share, exchange, ORDERS[self.order], weight=share.weight * size, replicated=size == 1
        )

    def _mixing(self, topology: Topology, team: Group) -> Exchange:
        if team.size == 1:
            return Local()
        rounds = rounds_for(topology, team.size, self.consensus) if self.consensus else self.rounds
        if self.wire.lossy:
            return CompressedGossip(topology, team, self.wire, rounds, self.rate)
        return Gossip(topology, team, rounds)


@record
class DPOSG(Decentralized):
    """The paper's algorithm: a ring, and plain optimistic steps."""

    name: Literal["DPOSG"] = "DPOSG"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: Topologies = Ring()
    exact: bool = True


@record
class DPOAdam(Decentralized):
    """The paper's practical form: a ring, and optimistic Adam with moments of each rank's own."""

    name: Literal["DP-OAdam"] = "DP-OAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: Topologies = Ring()


@record
class RandDPOAdam(Decentralized):
    """DP-OAdam on another random graph at every step."""

    name: Literal["Rand-DP-OAdam"] = "Rand-DP-OAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: Topologies = RandomRing()


@record
class CPOAdamCentral(CPOAdam):
    """The paper's centralized baseline, by its own spelling: optimistic Adam on the gradients of all."""

    name: Literal["CP-OAdam"] = "CP-OAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
