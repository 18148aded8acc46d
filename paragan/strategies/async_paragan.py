"""Asynchronous training: G and D move at once, each against what the other was a moment ago.

Shi, Li and You, "ParaGAN: A Scalable Distributed Training Framework for Generative Adversarial Networks", SoCC 2024,
arXiv 2411.03999.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Exact, Faithful, Wire
from paragan.comm.process_group import Group, Solo
from paragan.comm.world import World
from paragan.core.errors import Unusable
from paragan.core.schema import record
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.remote_opponents import Snapshots
from paragan.game.replay_policy import Buffer, Newest, Pattern, lag
from paragan.game.stale_opponents import PastCritic, PastFakes
from paragan.game.turn import apart
from paragan.strategies.base import Plain, Role, deal
from paragan.strategies.gd_teams import Mail, as_split, counts, divided
from paragan.strategies.sync import Feedback, Period, average

Lags = Annotated[Pattern, Field(min_length=1)] | None
Split = Annotated[str, BeforeValidator(as_split)]


@record
class Async(Plain):
    """G and D move at once. On several ranks some play G and some D: D draws from the images that G posted, G plays
    against the D that was posted last. On one rank, or where lags are given, every rank plays both: D on the images
    that G makes in its own turn, so that none are made for it alone.

    split          : how many ranks play G and how many D, "2:6"; "auto": so that neither waits; "none": all play both
    lead           : how many rounds a team may begin before the other has ended the first of them; then it waits.
                     1: both play the same round at once, and every run is the same, to the bit
    snapshot_every : rounds of D between the snapshots that it posts
    snapshot_wire  : the form they travel in
    buffer         : which of the images that G made D draws
    fake_lags      : how many rounds ago the newest of them were made; repeated, step by step
    critic_lags    : how many rounds ago the D was that G plays against (0: as it is)
    lags_of        : a run folder: both lags as they were there (train/lags.py)
    wire           : the form gradients travel in
    feedback       : the share of what the wire loses that is sent with the next step (None: what the wire asks for)
    every          : 2 or more: ranks step on their own gradients, and go on from their team's mean every so many steps
    """

    optimism: ClassVar[str] = "optimistic"
    extrapolation: ClassVar[float] = 2.0  # what makes up for moving at once and for a round of lag: docs/async.md
    name: Literal["async"] = "async"
    split: Split = "auto"
    lead: Annotated[int, Field(ge=1, le=512)] = 1
    snapshot_every: Annotated[int, Field(ge=1, le=512)] = 1
    snapshot_wire: Faithful = Exact()
    buffer: Buffer = Newest()
    fake_lags: Lags = None
    critic_lags: Lags = None
    lags_of: str = ""
    wire: Wire = Exact()
    feedback: Feedback = None
    every: Period = 1

    def check(self, ranks: int) -> None:
        divides = ":" in self.split
        if divides and sum(counts(self.split)) != ranks:
            g, d = counts(self.split)
            here = "is 1" if ranks == 1 else f"are {ranks}"
            fits = f"use {ranks // 2}:{ranks - ranks // 2}" if ranks > 1 else f"give --ranks {g + d}, or leave it out"
            raise Unusable(f"strategy.split={self.split} wants {g + d} ranks, and there {here}; {fits}")
        if divides and (self.lagging or self.lags_of):
            raise Unusable(
                "strategy.fake_lags and strategy.critic_lags are for ranks that play both players: leave them out, or "
                f"strategy.split={self.split}"
            )

    @property
    def lagging(self) -> bool:
        return self.fake_lags is not None or self.critic_lags is not None

    def role(self, game: Game, world: World, lanes: int) -> Role:
        if world.size == 1 or self.split == "none" or self.lagging:
            return self._both(game, world, lanes)
        return self._one(game, world, lanes)

    def _agreed(self, player: Player, team: Group, weight: float) -> tuple[Exchange, Group, float]:
        """With whom a player's turn is agreed, and how."""
        metered = team.metered(player.meter)
        exchange = average(self.wire, metered, self.feedback, self.every, weight)
        return exchange, metered if self.every == 1 else Solo(), weight

    def _both(self, game: Game, world: World, lanes: int) -> Role:
        """Every rank plays both, and sums gradients with all the others."""
        share, team, of_fakes, of_critic = deal(lanes, world.rank, world.size), world.everyone, *self._lags()
        fakes = PastFakes(self.buffer, lambda k: lag(of_fakes, k), max(of_fakes), game.ratio)
        critic = PastCritic(game.d, lambda k: lag(of_critic, k), max(of_critic))
        d = game.d_turn(fakes, *self._agreed(game.d, team, share.weight))
        g = game.g_turn(critic, *self._agreed(game.g, team, share.weight), fakes.post)
        replicated = self.every == 1 or team.size == 1
        seen = {"fakes": fakes.seen, "critic": critic.seen}
        return Role(apart(d, g, game.d_steps), share, replicated, for_d=False, past=(fakes, critic), seen=seen)

    def _lags(self) -> tuple[Pattern, Pattern]:
        return self.fake_lags or (0,), self.critic_lags or (0,)

    def _one(self, game: Game, world: World, lanes: int) -> Role:
        """This rank plays one player, and sums gradients with those who play it too."""
        snapshots = Snapshots(game.d, self.snapshot_every, self.snapshot_wire)
        mail = Mail(game, world, lanes, divided(self.split, game, world), self.lead, snapshots)
        share, team = mail.share, mail.team
        if mail.plays_g:
            post, critic = mail.fakes_post(), mail.critic_inbox()
            g = game.g_turn(critic, *self._agreed(game.g, team, share.weight), post)
            role = Role(((replace(g, fresh=True),),), share, past=(critic,), seen={"critic": critic.seen})
            return mail.bound(role, self.every, post.settle, critic.settle)
        inbox, post = mail.fakes_inbox(), mail.critic_post()
        fakes = PastFakes(self.buffer, inbox.lag, self.lead - 1, game.ratio)
        inbox.fakes = fakes
        d = game.d_turn(fakes, *self._agreed(game.d, team, share.weight))
        beats = (*(((d,),) * (game.d_steps - 1)), (replace(d, after=post),))
        role = Role(beats, share, past=(fakes,), seen={"fakes": fakes.seen})
        return mail.bound(role, self.every, inbox.settle, post.settle)
