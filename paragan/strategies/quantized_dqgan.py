"""DQGAN: quantized gradients with error feedback, on optimistic descent.

Chen, Yang, Shen and Pang, "A Distributed Training Algorithm of Generative Adversarial Networks with Quantized
Gradients", arXiv 2010.13359. With `paper_update` this is the paper's algorithm (comm/quantized_descent.py). By default
gradients are quantized in both directions (comm/compressed_allreduce.py), which sends less, and any optimizer takes an
optimistic step with their mean. Residuals are part of the checkpoint. Presets (presets.py): DQGAN is the paper's
algorithm, CPOAdam and CPOAdam-GQ are its baselines.
"""

from __future__ import annotations

from typing import Literal

from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Int8, Wire
from paragan.comm.outer_optimizer import AnyOuter, OuterMean
from paragan.comm.process_group import SingleRankGroup
from paragan.comm.quantized_descent import QuantizedDescent
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.strategies.base import (
    ExchangedPlayer,
    MinRanks,
    OptimisticDefaults,
    PeerTimeout,
    PlayerExchange,
    ReplaysBrokenRounds,
    Role,
    assign_lanes,
    make_lockstep_role,
)
from paragan.strategies.outer_steps import Delay, Fragments, Period, WithOuterOptimizer, outer_drain
from paragan.strategies.sync import TURN_ORDERS, Feedback, Order, make_gradient_exchange


@config_class
class Quantized(ReplaysBrokenRounds, OptimisticDefaults, WithOuterOptimizer):
    """Both players step at once, optimistically, and average gradients over a lossy wire with error feedback.

    wire             : how gradients are encoded for the network
    order            : "simultaneous" (both from the same point) or "alternating" (D, then G)
    feedback         : the fraction of what the wire loses that is sent with the next step (null: the wire's own
                       default; 1 with paper_update)
    sync_period      : 2 or more: ranks step on their own gradients, and average parameters every so many steps
    outer            : the step on what ranks have changed in a period (`Sync`): "mean" or "nesterov"
    outer_d          : that of D (null: as outer)
    fragments        : parts of a player that are sent in rounds of their own
    delay            : rounds from sending to applying; ranks train on meanwhile
    paper_update     : true: the paper's own update. Each player takes plain gradient steps with its learning rate, with
                       the gradient taken one step ahead; whole steps are quantized, and their mean is not. false: each
                       player's optimizer, made optimistic; gradients are quantized, and their mean too
    include_residual : with paper_update, whether the residual moves the point where the gradient is taken
    peer_timeout_s   : above 0: the others go on without a rank that died, or that is silent for so long; 0: the run
                       ends with the first lost rank (docs/lost_ranks.md)
    min_ranks        : with fewer ranks left, they stop with a checkpoint; 1: the last one goes on if all others have
                       exited
    """

    name: Literal["quantized", "DQGAN", "CPOAdam", "CPOAdam-GQ", "CP-OAdam"] = "quantized"
    wire: Wire = Int8()
    order: Order = "simultaneous"
    feedback: Feedback = None
    sync_period: Period = 1
    outer: AnyOuter = OuterMean()
    outer_d: AnyOuter | None = None
    fragments: Fragments = 1
    delay: Delay = 0
    paper_update: bool = False
    include_residual: bool = True
    peer_timeout_s: PeerTimeout = 0.0
    min_ranks: MinRanks = 2

    @property
    def supports_batch_ramp(self) -> bool:
        return True

    @property
    def supports_late_start(self) -> bool:
        return True

    @property
    def uses_single_bucket(self) -> bool:
        return self.paper_update

    @property
    def error_feedback(self) -> float:
        if self.feedback is None:
            return 1.0 if self.paper_update else self.wire.feedback
        return self.feedback

    def check(self, ranks: int) -> None:
        if self.paper_update and self.sync_period > 1:
            raise UsageError(
                f"strategy.sync_period={self.sync_period}: the paper's update averages gradients in every step. Use "
                "strategy.sync_period=1 or strategy.paper_update=false."
            )
        self.check_rank_loss(fragments=self.fragments == 1, delay=self.delay == 0)
        self.check_outer(paper_update=self.paper_update)

    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
        team = world.all_ranks if self.sync_period == 1 else SingleRankGroup()
        exchange = self._make_exchange(player, world, weight)
        return PlayerExchange(exchange, team, weight, drain=outer_drain(exchange))

    def _make_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> Exchange:
        group = world.all_ranks.with_meter(player.meter)
        if not self.paper_update:
            outer = self.outer_steps(player.number)
            return make_gradient_exchange(self.wire, group, self.error_feedback, self.sync_period, weight, outer=outer)
        return QuantizedDescent(
            self.wire, group, lambda: player.learning_rate, weight, self.error_feedback, self.include_residual
        )

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share = assign_lanes(lanes, world.rank, world.size)
        g, d = (self.player_exchange(player, world, share.weight) for player in game.players)
        return make_lockstep_role(game, share, (g, d), TURN_ORDERS[self.order], world.size)
