"""Quantized training: gradients over a lossy wire with error feedback, on optimistic descent.

Chen, Yang, Shen and Pang, "A Distributed Training Algorithm of Generative Adversarial Networks with Quantized
Gradients" (DQGAN), arXiv 2010.13359.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Exact, Int8, Wire
from paragan.comm.exchange import OptimisticMirrorDescent
from paragan.comm.process_group import SingleRankGroup
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.strategies.base import OptimisticDefaults, Role, assign_lanes, make_lockstep_role
from paragan.strategies.sync import TURN_ORDERS, Feedback, Period, make_gradient_exchange


@config_class
class Quantized(OptimisticDefaults):
    """Both players move at once, optimistically, and sum gradients over a lossy wire; what the wire loses is sent
    with the next step.

    wire     : the form gradients travel in
    feedback : the share of what the wire loses that is sent with the next step (None: what the wire asks for, and all
               of it with exact)
    every    : 2 or more: ranks step on their own gradients, and go on from their mean every so many steps
    exact    : the paper's own update, optimistic mirror descent: a plain gradient step with each player's learning
               rate, the gradient taken one step ahead. Otherwise each player's optimizer, made optimistic.
    residual : with exact, whether what is still owed moves the point where the gradient is taken
    """

    name: Literal["quantized"] = "quantized"
    wire: Wire = Int8()
    order: Literal["alternately", "together"] = "together"
    feedback: Feedback = None
    sync_period: Period = 1
    paper_update: bool = False
    include_residual: bool = True
    peer_timeout_s: ClassVar[float] = 0.0

    def check(self, ranks: int) -> None:
        if self.paper_update and self.sync_period > 1:
            raise UsageError(
                f"strategy.sync_period={self.sync_period} does not go with strategy.paper_update=true: leave it out"
            )

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share = assign_lanes(lanes, world.rank, world.size)
        feedback = 1.0 if self.paper_update and self.feedback is None else self.feedback

        def make_exchange(player: Player) -> Exchange:
            team = world.all_ranks.with_meter(player.meter)
            inner = make_gradient_exchange(self.wire, team, feedback, self.sync_period, share.weight)
            if not self.paper_update:
                return inner
            return OptimisticMirrorDescent(inner, lambda: player.learning_rate, share.weight, self.include_residual)

        at_one = self.sync_period == 1 or world.size == 1
        everyone = world.all_ranks if at_one else SingleRankGroup()
        return make_lockstep_role(game, everyone, share, make_exchange, TURN_ORDERS[self.order], replicated=at_one)


@config_class
class CPOAdam(Quantized):
    """The paper's first baseline: optimistic Adam on exact gradients."""

    name: Literal["CPOAdam"] = "CPOAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
    wire: Wire = Exact()


@config_class
class CPOAdamGQ(Quantized):
    """The paper's second baseline: optimistic Adam on quantized gradients, without feedback."""

    name: Literal["CPOAdam-GQ"] = "CPOAdam-GQ"  # pyright: ignore[reportIncompatibleVariableOverride]
    feedback: Feedback = 0.0
