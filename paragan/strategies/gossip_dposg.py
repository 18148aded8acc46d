"""DPOSG: decentralized training, where each rank mixes its players with those of a few neighbors.

Liu, Zhang, Mroueh, Cui, Ross, Yang and Das, "A Decentralized Parallel Algorithm for Training Generative Adversarial
Nets", NeurIPS 2020, arXiv 1910.12999. The update of DPOSG (`paper_update`), with the players of all ranks as rows of
X, t rounds of mixing, and one gradient F an iteration:

    mixed = W^t X_before              Blocking(Gossip): before the gradient is computed (comm/gossip.py)
    Z = mixed - lr F(Z_before)        OptimisticMirrorDescent: the point of the gradient (comm/exchange.py)
    X = mixed - lr F(Z)

By default (DP-OAdam) each player's own optimizer makes the optimistic step, and mixing overlaps with the gradient:
parameters leave when the round starts and are mixed before the optimizer steps. DPOSG, DP-OAdam, Rand-DP-OAdam and
CP-OAdam are presets (presets.py).
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
from paragan.comm.topology import AnyTopology, OnePeer, Topology, rounds_for_consensus
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.strategies.base import (
    Coordination,
    ExchangedPlayer,
    MinRanks,
    OptimisticDefaults,
    PeerTimeout,
    PlayerExchange,
    Role,
    Semantics,
    SurvivesRankLoss,
    assign_lanes,
    make_lockstep_role,
)
from paragan.strategies.sync import TURN_ORDERS, Order

TAGS_PER_PLAYER = 1 << 16  # more than a player has buckets


@config_class
class Decentralized(SurvivesRankLoss, OptimisticDefaults):
    """Both players step at once, optimistically, each rank on its own gradient; parameters travel to neighbors while
    it is computed, and are averaged before the step.

    topology            : the graph of neighbors
    rounds              : how often parameters are averaged with neighbors in a step
    consensus_tolerance : in place of rounds: as many as leave this fraction of the distance between ranks
    staleness           : how many steps a message may be late, so that a slow link delays nobody; late links are
                          averaged as often as messages arrive (AD-PSGD). For undirected graphs that do not change. The
                          result then depends on timing
    sync_period         : average only at the end of every so many steps (local SGDA)
    wire                : how parameters are encoded; a lossy wire carries their changes (CHOCO-SGD)
    consensus_rate      : step size of an averaging step over a lossy wire (1: all the way to the average); wires that
                          lose much need less
    order               : "simultaneous" (both from the same point) or "alternating" (D, then G)
    paper_update        : true: the paper's own update: average first, then optimistic mirror descent with each
                          player's learning rate. false: each player's optimizer, made optimistic
    peer_timeout_s      : a rank that is silent for so long is dropped, and the others go on; 0: the run ends with it. A
                          rank that died is dropped at once (docs/lost_ranks.md)
    min_ranks           : with fewer ranks left, they stop with a checkpoint; 1: the last one goes on if all others have
                          exited
    """

    name: Literal["gossip", "async-gossip", "DPOSG", "DP-OAdam", "Rand-DP-OAdam"] = "gossip"
    topology: AnyTopology = OnePeer()
    rounds: Annotated[int, Field(ge=1)] = 1
    consensus_tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None
    staleness: Annotated[int, Field(ge=0)] = 0
    sync_period: Annotated[int, Field(ge=1)] = 1
    wire: Wire = Exact()
    consensus_rate: Annotated[float, Field(gt=0, le=1)] = 1.0
    order: Order = "simultaneous"
    paper_update: bool = False
    peer_timeout_s: PeerTimeout = 10.0
    min_ranks: MinRanks = 2

    @property
    def replicas_drift(self) -> bool:
        return True

    @property
    def supports_late_start(self) -> bool:
        return True

    @property
    def coordination(self) -> Coordination:
        return "gossip"

    @property
    def semantics(self) -> Semantics:
        if self.sync_period > 1:
            return "periodic"
        return "stale" if self.staleness else "decentralized"

    @property
    def error_feedback(self) -> float:
        return 1.0  # a lossy wire carries differences to what neighbors hold, so that what is lost is sent later

    @property
    def gossip_topology(self) -> Topology:
        return self.topology

    @property
    def max_message_delay(self) -> int:
        return self.staleness

    def check(self, ranks: int) -> None:
        graphs.check_topology(self.topology, ranks)
        self.check_rank_loss()
        if self.staleness:
            self._check_staleness(ranks)

    def _check_staleness(self, ranks: int) -> None:
        required = {
            "rounds": self.rounds == 1,
            "consensus_tolerance": self.consensus_tolerance is None,
            "wire": not self.wire.lossy,
            "paper_update": not self.paper_update,
        }
        for field, is_default in required.items():
            if not is_default:
                raise UsageError(
                    f"strategy.staleness={self.staleness}: does not work with strategy.{field}. Leave one of them out."
                )
        if not graphs.is_static(self.topology, ranks):
            static = [
                t.name
                for t in graphs.BUILTIN_TOPOLOGIES
                if not t.unsupported_reason(ranks) and graphs.is_static(t, ranks)
            ]
            raise UsageError(
                f"strategy.topology={self.topology.name}: changes or is directed, and strategy.staleness="
                f"{self.staleness} needs links that stay. Use {' or '.join(static)}."
            )

    def player_exchange(
        self, player: ExchangedPlayer, world: World, weight: float, links: AsyncGossipLinks | None = None
    ) -> PlayerExchange:
        """links: to neighbors whose messages may be late, where several players share them."""
        links = links or self._make_links(world)
        if links:
            mixing: Exchange = links.make_exchange(player)
        else:
            mixing = self._make_mixing(self._topology_of(world), world.all_ranks.with_meter(player.meter))
        exchange: Exchange = EveryN(mixing, self.sync_period)
        if self.paper_update:
            exchange = Chain(Blocking(exchange), OptimisticMirrorDescent(lambda: player.learning_rate))
        # a rank's gradient is the mean over its own lanes, however many it has
        own_step = PlayerExchange(exchange, SingleRankGroup(), weight=1.0)
        return replace(own_step, barrier=links.barrier, drain=links.drain) if links else own_step

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share = assign_lanes(lanes, world.rank, world.size)
        links = self._make_links(world)
        g, d = (self.player_exchange(player, world, share.weight, links) for player in game.players)
        return make_lockstep_role(game, share, (g, d), TURN_ORDERS[self.order], world.size)

    def _topology_of(self, world: World) -> Topology:
        return graphs.restrict_to(self.topology, world.original_ranks, world.initial_size)

    def _make_links(self, world: World) -> AsyncGossipLinks | None:
        if not self.staleness or world.size == 1:
            return None
        return AsyncGossipLinks(self._topology_of(world), world, self.staleness)

    def _make_mixing(self, topology: Topology, team: Group) -> Exchange:
        if team.size == 1:
            return NoExchange()
        rounds = self.rounds
        if self.consensus_tolerance:
            rounds = rounds_for_consensus(topology, team.size, self.consensus_tolerance)
        if self.wire.lossy:
            return CompressedGossip(topology, team, self.wire, rounds, self.consensus_rate)
        return Gossip(topology, team, rounds)


class AsyncGossipLinks:
    """The links of one rank to its neighbors in a static graph; both players use them."""

    def __init__(self, topology: Topology, world: World, staleness: int):
        self.weights = graphs.neighbors(topology, world.size, world.rank, 0).recv_from
        self.world = world
        self.staleness = staleness
        self.exchanges = list[AsyncGossip]()
        pairs = sorted(self.weights, key=lambda j: sorted((world.rank, j)))
        self.groups = {j: world.pair_group(j) for j in pairs}
        self.barrier_thread = self._make_wait_thread()

    def make_exchange(self, player: ExchangedPlayer) -> AsyncGossip:
        groups = {j: group.with_meter(player.meter) for j, group in self.groups.items()}
        tag = 1 + TAGS_PER_PLAYER * len(self.exchanges)
        exchange = AsyncGossip(
            self.weights, groups, lambda j: self._make_wait_thread(self.groups[j]), self.staleness, tag
        )
        self.exchanges.append(exchange)
        return exchange

    def _make_wait_thread(self, group: Group | None = None) -> WaitThread:
        waiter = self.world.make_wait_thread(group)
        weakref.finalize(self, waiter.close)
        return waiter

    def drain(self) -> None:
        drain(self.exchanges, self.world.all_ranks, self.barrier_thread)

    def barrier(self) -> None:
        barrier(self.exchanges, self.world.all_ranks, self.barrier_thread)
