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
from paragan.comm.async_gossip import AsyncGossip, barrier, drain
from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Exact, Wire
from paragan.comm.exchange import Blocking, Chain, EveryN, NoExchange, OptimisticMirrorDescent
from paragan.comm.gossip import CompressedGossip, Gossip
from paragan.comm.process_group import Group, SingleRankGroup, WaitThread
from paragan.comm.topology import AnyTopology, OnePeer, RandomRing, Ring, Topology, rounds_for_consensus
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.strategies.base import OptimisticDefaults, Role, assign_lanes, make_lockstep_role
from paragan.strategies.quantized_dqgan import CPOAdam
from paragan.strategies.sync import TURN_ORDERS

TAGS_PER_PLAYER = 1 << 16  # more than a player has buckets


@config_class
class Decentralized(OptimisticDefaults):
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
    topology: AnyTopology = OnePeer()
    rounds: Annotated[int, Field(ge=1)] = 1
    consensus_tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    staleness: Annotated[int, Field(ge=0)] = 0
    sync_period: Annotated[int, Field(ge=1)] = 1
    wire: Wire = Exact()
    consensus_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    order: Literal["alternately", "together"] = "together"
    paper_update: bool = False
    peer_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0

    def check(self, ranks: int) -> None:
        graphs.check_topology(self.topology, ranks)
        if 0 < self.peer_timeout_s < 1:
            raise UsageError(
                f"strategy.peer_timeout_s={self.peer_timeout_s:g} must be 1 or more, or 0: never go on without"
            )
        if self.staleness:
            self._check_staleness(ranks)

    def _check_staleness(self, ranks: int) -> None:
        alone = {"rounds": self.rounds == 1, "consensus": self.consensus_tolerance is None, "wire": not self.wire.lossy}
        for field, fits in (alone | {"exact": not self.paper_update}).items():
            if not fits:
                raise UsageError(f"strategy.staleness={self.staleness} does not go with strategy.{field}: leave it out")
        if not graphs.is_static(self.topology, ranks):
            there = ", ".join(
                t.name for t in graphs.BUILTIN_TOPOLOGIES if not t.misfit(ranks) and graphs.is_static(t, ranks)
            )
            raise UsageError(
                f"strategy.topology={self.topology.name} changes or is directed, and strategy.staleness="
                f"{self.staleness} needs links that stay: {there}"
            )

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share, size = assign_lanes(lanes, world.rank, world.size), world.size
        topology = graphs.restrict_to(self.topology, world.original_ranks, world.initial_size)
        late = AsyncGossipLinks(topology, world, self.staleness) if self.staleness and size > 1 else None

        def make_exchange(player: Player) -> Exchange:
            mixing = (
                late.make_exchange(player)
                if late
                else self._make_mixing(topology, world.all_ranks.with_meter(player.meter))
            )
            mixing = EveryN(mixing, self.sync_period)
            return (
                Chain(Blocking(mixing), OptimisticMirrorDescent(NoExchange(), lambda: player.learning_rate))
                if self.paper_update
                else mixing
            )

        # a rank's gradient is the mean over its own lanes; where ranks own unequally many, those of more weigh more
        weight, order, alone = share.weight * size, TURN_ORDERS[self.order], size == 1
        role = make_lockstep_role(game, SingleRankGroup(), share, make_exchange, order, weight=weight, replicated=alone)
        return replace(role, barrier=late.barrier, drain=late.drain) if late else role

    def _make_mixing(self, topology: Topology, team: Group) -> Exchange:
        if team.size == 1:
            return NoExchange()
        rounds = (
            rounds_for_consensus(topology, team.size, self.consensus_tolerance)
            if self.consensus_tolerance
            else self.rounds
        )
        if self.wire.lossy:
            return CompressedGossip(topology, team, self.wire, rounds, self.consensus_rate)
        return Gossip(topology, team, rounds)


class AsyncGossipLinks:
    """Links to the neighbours in a graph that stays, for both players."""

    def __init__(self, topology: Topology, world: World, staleness: int):
        self.weights = graphs.neighbors(topology, world.size, world.rank, 0).recv_from
        self.world, self.staleness, self.exchanges = world, staleness, list[AsyncGossip]()
        pairs = sorted(self.weights, key=lambda j: sorted((world.rank, j)))
        self.groups = {j: world.pair_group(j) for j in pairs}

    def make_exchange(self, player: Player) -> AsyncGossip:
        groups = {j: group.with_meter(player.meter) for j, group in self.groups.items()}
        tag = 1 + TAGS_PER_PLAYER * len(self.exchanges)
        self.exchanges.append(AsyncGossip(self.weights, groups, self._make_wait_thread, self.staleness, tag))
        return self.exchanges[-1]

    def _make_wait_thread(self, j: int) -> WaitThread:
        waiter = self.world.make_wait_thread(self.groups[j])
        weakref.finalize(self, waiter.close)
        return waiter

    def drain(self) -> None:
        drain(self.exchanges, self.world.all_ranks, self.world.timeout_s)

    def barrier(self) -> None:
        barrier(self.exchanges, self.world.all_ranks, self.world.timeout_s)


@config_class
class AsyncGossipPreset(Decentralized):
    """A ring whose links may lag by up to 16 steps."""

    name: Literal["async-gossip"] = "async-gossip"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: AnyTopology = Ring()
    staleness: Annotated[int, Field(ge=0)] = 16


@config_class
class DPOSG(Decentralized):
    """The paper's algorithm: a ring, and plain optimistic steps."""

    name: Literal["DPOSG"] = "DPOSG"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: AnyTopology = Ring()
    paper_update: bool = True


@config_class
class DPOAdam(Decentralized):
    """The paper's practical form: a ring, and optimistic Adam with moments of each rank's own."""

    name: Literal["DP-OAdam"] = "DP-OAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: AnyTopology = Ring()


@config_class
class RandDPOAdam(Decentralized):
    """DP-OAdam on another random graph at every step."""

    name: Literal["Rand-DP-OAdam"] = "Rand-DP-OAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
    topology: AnyTopology = RandomRing()


@config_class
class CPOAdamCentral(CPOAdam):
    """The paper's centralized baseline, by its own spelling: optimistic Adam on the gradients of all."""

    name: Literal["CP-OAdam"] = "CP-OAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
