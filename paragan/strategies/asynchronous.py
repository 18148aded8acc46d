"""Asynchronous training: G and D move at once, each against what the other was a while ago.

Shi, Li and You, "ParaGAN: A Scalable Distributed Training Framework for Generative Adversarial Networks", SoCC 2024,
arXiv 2411.03999.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ..comm.compress import Exact, Wire
from ..comm.exchange import Exchange
from ..comm.world import World
from ..config import record
from ..game.buffer import Buffer, Newest, Pattern, lag
from ..game.game import Game
from ..game.opponents import PastCritic, PastFakes
from ..game.player import Player
from ..game.turn import together
from .role import Plain, Role, deal
from .sync import Feedback, average

Lags = Annotated[Pattern, Field(min_length=1)]


@record
class Async(Plain):
    """Both players move at once: D on images that G made in its own turn a round earlier, so that none are made for it,
    and G against D as it was before it moved. Every rank plays both, and sums gradients with all the others.

    buffer      : which of the images that G made D draws
    fake_lags   : how many rounds ago the newest of them were made (0: made for D, now); repeated, step by step
    critic_lags : how many rounds ago the D was that G plays against (0: as it is)
    wire        : the form gradients travel in
    feedback    : the share of what the wire loses that is sent with the next step (None: what the wire asks for)
    """

    name: Literal["async"] = "async"
    buffer: Buffer = Newest()
    fake_lags: Lags = (1,)
    critic_lags: Lags = (0,)
    wire: Wire = Exact()
    feedback: Feedback = None

    def role(self, game: Game, world: World, lanes: int) -> Role:
        share, team = deal(lanes, world.rank, world.size), world.everyone
        fakes = PastFakes(self.buffer, game.live_fakes, lambda step: lag(self.fake_lags, step), max(self.fake_lags))
        critic = PastCritic(game.d, lambda step: lag(self.critic_lags, step), max(self.critic_lags))

        def exchange(player: Player) -> Exchange:
            return average(self.wire, team.metered(player.meter), self.feedback)

        d = game.d_turn(fakes, exchange(game.d), team.metered(game.d.meter), share.weight)
        g = game.g_turn(critic, exchange(game.g), team.metered(game.g.meter), share.weight, fakes.post)
        live = sum(not back for back in self.fake_lags) / len(self.fake_lags)
        return Role(together(d, g, game.d_steps), share, for_d=live, past=(fakes, critic))
