"""Decentralized training: no rank waits for all; each mixes its players with those of a few neighbours.

Liu, Zhang, Mroueh, Cui, Ross, Yang and Das, "A Decentralized Parallel Algorithm for Training Generative Adversarial
Nets" (DPOSG), NeurIPS 2020, arXiv 1910.12999.
"""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from paragan.comm import topology as graphs
from paragan.comm.async_gossip import LateGossip, meet, settle
from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Exact, Wire
from paragan.comm.exchange import Every, Local, Lookahead, Now, Then
from paragan.comm.gossip import CompressedGossip, Gossip
from paragan.comm.process_group import Group, Solo, Waiter
from paragan.comm.topology import OnePeer, RandomRing, Ring, Topologies, Topology, rounds_for
from paragan.comm.world import World
from paragan.core.errors import Unusable
from paragan.core.schema import record
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.strategies.base import Optimistic, Role, deal, lockstep
from paragan.strategies.quantized_dqgan import CPOAdam
from paragan.strategies.sync import ORDERS

TAGS = 1 << 16  # more than a player has buckets


@record
class Decentralized(Optimistic):
    """Both players move at once, optimistically, each rank on its own gradient; parameters travel to neighbours
    while it is computed, and are mixed before the step.

    topology    : who hears whom
    rounds      : how often parameters are mixed in a step
    consensus   : instead of rounds: as many as leave this share of the distance between ranks
    staleness   : how many steps a message may be late: a slow link holds nobody up, and is mixed over as often as it
                  allows (AD-PSGD). For undirected graphs that stay; what a run does then depends on the time
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
    staleness: Annotated[int, Field(ge=0)] = 0
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
        if self.staleness:
            self._check_staleness(ranks)

    def _check_staleness(self, ranks: int) -> None:
        alone = {"rounds": self.rounds == 1, "consensus": self.consensus is None, "wire": not self.wire.lossy}
        for field, fits in (alone | {"exact": not self.exact}).items():
            if not fits:
                raise Unusable(f"strategy.staleness={self.staleness} does not go with strategy.{field}: leave it out")
        if not graphs.stays(self.topology, ranks):
            there = ", ".join(t.name for t in graphs.EVERY if not t.misfit(ranks) and graphs.stays(t, ranks))
            raise Unusable(
                f"strategy.topology={self.topology.name} changes or is directed, and strategy.staleness="
                f"{self.staleness} needs links that stay: {there}"
            )

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share, size = deal(lanes, world.rank, world.size), world.size
        topology = graphs.among(self.topology, world.seats, world.began)
        late = Late(topology, world, self.staleness) if self.staleness and size > 1 else None

        def exchange(player: Player) -> Exchange:
            mixing = late.mixing(player) if late else self._mixing(topology, world.everyone.metered(player.meter))
            mixing = Every(mixing, self.local_steps)
            return Then(Now(mixing), Lookahead(Local(), lambda: player.learning_rate)) if self.exact else mixing

        # a rank's gradient is the mean over its own lanes; where ranks own unequally many, those of more weigh more
        weight, order, alone = share.weight * size, ORDERS[self.order], size == 1
        role = lockstep(game, Solo(), share, exchange, order, weight=weight, replicated=alone)
        return replace(role, meet=late.meet, settle=late.settle) if late else role

    def _mixing(self, topology: Topology, team: Group) -> Exchange:
        if team.size == 1:
            return Local()
        rounds = rounds_for(topology, team.size, self.consensus) if self.consensus else self.rounds
        if self.wire.lossy:
            return CompressedGossip(topology, team, self.wire, rounds, self.rate)
        return Gossip(topology, team, rounds)


class Late:
    """Links to the neighbours in a graph that stays, for both players."""

    def __init__(self, topology: Topology, world: World, staleness: int):
        self.weights = graphs.mates(topology, world.size, world.rank, 0).hears
        self.world, self.staleness, self.mixings = world, staleness, list[LateGossip]()
        pairs = sorted(self.weights, key=lambda j: sorted((world.rank, j)))
        self.groups = {j: world.link(j) for j in pairs}

    def mixing(self, player: Player) -> LateGossip:
        groups = {j: group.metered(player.meter) for j, group in self.groups.items()}
        tag = 1 + TAGS * len(self.mixings)
        self.mixings.append(LateGossip(self.weights, groups, self._waiter, self.staleness, tag))
        return self.mixings[-1]

    def _waiter(self, j: int) -> Waiter:
        waiter = self.world.waiter(self.groups[j])
        weakref.finalize(self, waiter.end)
        return waiter

    def settle(self) -> None:
        settle(self.mixings, self.world.everyone, self.world.timeout_s)

    def meet(self) -> None:
        meet(self.mixings, self.world.everyone, self.world.timeout_s)


@record
class AsyncGossip(Decentralized):
    """A ring whose links may lag by up to 16 steps."""

    name: Literal["async-gossip"] = "async-gossip"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: Topologies = Ring()
    staleness: Annotated[int, Field(ge=0)] = 16


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
