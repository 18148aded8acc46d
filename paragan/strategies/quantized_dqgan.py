"""Quantized training: gradients over a lossy wire with error feedback, on optimistic descent.

Chen, Yang, Shen and Pang, "A Distributed Training Algorithm of Generative Adversarial Networks with Quantized
Gradients" (DQGAN), arXiv 2010.13359.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Exact, Int8, Wire
from paragan.comm.exchange import Lookahead
from paragan.comm.process_group import Solo
from paragan.comm.world import World
from paragan.core.errors import Unusable
from paragan.core.schema import record
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.strategies.base import Optimistic, Role, deal, lockstep
from paragan.strategies.sync import ORDERS, Feedback, Period, average


@record
class Quantized(Optimistic):
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
    every: Period = 1
    exact: bool = False
    residual: bool = True
    lost_after_s: ClassVar[float] = 0.0

    def check(self, ranks: int) -> None:
        if self.exact and self.every > 1:
            raise Unusable(f"strategy.every={self.every} does not go with strategy.exact=true: leave it out")

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share = deal(lanes, world.rank, world.size)
        feedback = 1.0 if self.exact and self.feedback is None else self.feedback

        def exchange(player: Player) -> Exchange:
            team = world.everyone.metered(player.meter)
            inner = average(self.wire, team, feedback, self.every, share.weight)
            if not self.exact:
                return inner
            return Lookahead(inner, lambda: player.learning_rate, share.weight, self.residual)

        at_one = self.every == 1 or world.size == 1
        everyone = world.everyone if at_one else Solo()
        return lockstep(game, everyone, share, exchange, ORDERS[self.order], replicated=at_one)


@record
class CPOAdam(Quantized):
    """The paper's first baseline: optimistic Adam on exact gradients."""

    name: Literal["CPOAdam"] = "CPOAdam"  # pyright: ignore[reportIncompatibleVariableOverride]
    wire: Wire = Exact()


@record
class CPOAdamGQ(Quantized):
    """The paper's second baseline: optimistic Adam on quantized gradients, without feedback."""

    name: Literal["CPOAdam-GQ"] = "CPOAdam-GQ"  # pyright: ignore[reportIncompatibleVariableOverride]
    feedback: Feedback = 0.0
