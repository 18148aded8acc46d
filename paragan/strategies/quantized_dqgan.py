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
from paragan.comm.process_group import SingleRankGroup
from paragan.comm.quantized_descent import QuantizedDescent
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.strategies.base import (
    ExchangedPlayer,
    OptimisticDefaults,
    PlayerExchange,
    Role,
    assign_lanes,
    make_lockstep_role,
)
from paragan.strategies.sync import TURN_ORDERS, Feedback, Order, Period, make_gradient_exchange


@config_class
class Quantized(OptimisticDefaults):
    """Both players step at once, optimistically, and average gradients over a lossy wire with error feedback.

    wire             : how gradients are encoded for the network
    order            : "simultaneous" (both from the same point) or "alternating" (D, then G)
    feedback         : the fraction of what the wire loses that is sent with the next step (null: the wire's own
                       default; 1 with paper_update)
    sync_period      : 2 or more: ranks step on their own gradients, and average parameters every so many steps
    paper_update     : true: the paper's own update. Each player takes plain gradient steps with its learning rate, with
                       the gradient taken one step ahead; whole steps are quantized, and their mean is not. false: each
                       player's optimizer, made optimistic; gradients are quantized, and their mean too
    include_residual : with paper_update, whether the residual moves the point where the gradient is taken
    """

    name: Literal["quantized", "DQGAN", "CPOAdam", "CPOAdam-GQ", "CP-OAdam"] = "quantized"
    wire: Wire = Int8()
    order: Order = "simultaneous"
    feedback: Feedback = None
    sync_period: Period = 1
    paper_update: bool = False
    include_residual: bool = True

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

    def player_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> PlayerExchange:
        team = world.all_ranks if self.sync_period == 1 else SingleRankGroup()
        return PlayerExchange(self._make_exchange(player, world, weight), team, weight)

    def _make_exchange(self, player: ExchangedPlayer, world: World, weight: float) -> Exchange:
        group = world.all_ranks.with_meter(player.meter)
        if not self.paper_update:
            return make_gradient_exchange(self.wire, group, self.error_feedback, self.sync_period, weight)
        return QuantizedDescent(
            self.wire, group, lambda: player.learning_rate, weight, self.error_feedback, self.include_residual
        )

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share = assign_lanes(lanes, world.rank, world.size)
        g, d = (self.player_exchange(player, world, share.weight) for player in game.players)
        return make_lockstep_role(game, share, (g, d), TURN_ORDERS[self.order], world.size)
