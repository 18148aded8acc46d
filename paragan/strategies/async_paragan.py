"""Asynchronous training: G and D move at once, each against what the other was a moment ago.

Shi, Li and You, "ParaGAN: A Scalable Distributed Training Framework for Generative Adversarial Networks", SoCC 2024,
arXiv 2411.03999.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from paragan.comm.bucket import Exchange
from paragan.comm.compression.compressors import Exact, SnapshotWire, Wire
from paragan.comm.process_group import Group, SingleRankGroup
from paragan.comm.world import World
from paragan.core.errors import UsageError
from paragan.core.schema import config_class
from paragan.game.game import Game
from paragan.game.player import Player
from paragan.game.remote_opponents import SnapshotCodec
from paragan.game.replay_policy import AnyReplayPolicy, LagPattern, Latest, get_lag
from paragan.game.stale_opponents import FakeReplayBuffer, StaleDiscriminator
from paragan.game.turn import simultaneous_reuse_fakes
from paragan.strategies.base import Role, StrategyDefaults, assign_lanes
from paragan.strategies.gd_teams import TeamLinks, parse_split, split_ranks, validate_split
from paragan.strategies.sync import Feedback, Period, make_gradient_exchange

Lags = Annotated[LagPattern, Field(min_length=1)] | None
Split = Annotated[str, BeforeValidator(validate_split)]


@config_class
class Async(StrategyDefaults):
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

    optimizer_wrapper: ClassVar[str] = "optimistic"
    extrapolation: ClassVar[float] = 2.0  # what makes up for moving at once and for a round of lag: docs/async.md
    name: Literal["async"] = "async"
    split: Split = "auto"
    max_lead_rounds: Annotated[int, Field(ge=1, le=512)] = 1
    snapshot_every: Annotated[int, Field(ge=1, le=512)] = 1
    snapshot_wire: SnapshotWire = Exact()
    replay_policy: AnyReplayPolicy = Latest()
    fake_lags: Lags = None
    critic_lags: Lags = None
    lags_from_run: str = ""
    wire: Wire = Exact()
    feedback: Feedback = None
    sync_period: Period = 1

    def check(self, ranks: int) -> None:
        divides = ":" in self.split
        if divides and sum(parse_split(self.split)) != ranks:
            g, d = parse_split(self.split)
            here = "is 1" if ranks == 1 else f"are {ranks}"
            fits = f"use {ranks // 2}:{ranks - ranks // 2}" if ranks > 1 else f"give --ranks {g + d}, or leave it out"
            raise UsageError(f"strategy.split={self.split} wants {g + d} ranks, and there {here}; {fits}")
        if divides and (self.has_fixed_lags or self.lags_from_run):
            raise UsageError(
                "strategy.fake_lags and strategy.critic_lags are for ranks that play both players: leave them out, or "
                f"strategy.split={self.split}"
            )

    @property
    def has_fixed_lags(self) -> bool:
        return self.fake_lags is not None or self.critic_lags is not None

    def role(self, game: Game, world: World, lanes: int) -> Role:
        if world.size == 1 or self.split == "none" or self.has_fixed_lags:
            return self._colocated_role(game, world, lanes)
        return self._split_role(game, world, lanes)

    def _exchange_args(self, player: Player, team: Group, weight: float) -> tuple[Exchange, Group, float]:
        """With whom a player's turn is agreed, and how."""
        metered = team.with_meter(player.meter)
        exchange = make_gradient_exchange(self.wire, metered, self.feedback, self.sync_period, weight)
        return exchange, metered if self.sync_period == 1 else SingleRankGroup(), weight

    def _colocated_role(self, game: Game, world: World, lanes: int) -> Role:
        """Every rank plays both, and sums gradients with all the others."""
        share, team, of_fakes, of_critic = (
            assign_lanes(lanes, world.rank, world.size),
            world.all_ranks,
            *self._lag_patterns(),
        )
        fakes = FakeReplayBuffer(
            self.replay_policy, lambda k: get_lag(of_fakes, k), max(of_fakes), game.g_to_d_batch_ratio
        )
        critic = StaleDiscriminator(game.d, lambda k: get_lag(of_critic, k), max(of_critic))
        d = game.d_turn(fakes, *self._exchange_args(game.d, team, share.weight))
        g = game.g_turn(critic, *self._exchange_args(game.g, team, share.weight), fakes.push)
        replicated = self.sync_period == 1 or team.size == 1
        seen = {"fakes": fakes.staleness, "critic": critic.staleness}
        return Role(
            simultaneous_reuse_fakes(d, g, game.d_steps),
            share,
            replicated,
            extra_fakes_for_d=False,
            replay_state=(fakes, critic),
            staleness=seen,
        )

    def _lag_patterns(self) -> tuple[LagPattern, LagPattern]:
        return self.fake_lags or (0,), self.critic_lags or (0,)

    def _split_role(self, game: Game, world: World, lanes: int) -> Role:
        """This rank plays one player, and sums gradients with those who play it too."""
        snapshots = SnapshotCodec(game.d, self.snapshot_every, self.snapshot_wire)
        mail = TeamLinks(game, world, lanes, split_ranks(self.split, game, world), self.max_lead_rounds, snapshots)
        share, team = mail.share, mail.team
        if mail.plays_g:
            post, critic = mail.make_fake_sender(), mail.make_snapshot_receiver()
            g = game.g_turn(critic, *self._exchange_args(game.g, team, share.weight), post)
            role = Role(
                ((replace(g, needs_new_reals=True),),),
                share,
                replay_state=(critic,),
                staleness={"critic": critic.staleness},
            )
            return mail.to_role(role, self.sync_period, post.flush, critic.drain)
        inbox, post = mail.make_fake_receiver(), mail.make_snapshot_sender()
        fakes = FakeReplayBuffer(self.replay_policy, inbox.lag, self.max_lead_rounds - 1, game.g_to_d_batch_ratio)
        inbox.replay_buffer = fakes
        d = game.d_turn(fakes, *self._exchange_args(game.d, team, share.weight))
        beats = (*(((d,),) * (game.d_steps - 1)), (replace(d, on_step_end=post),))
        role = Role(beats, share, replay_state=(fakes,), staleness={"fakes": fakes.staleness})
        return mail.to_role(role, self.sync_period, inbox.drain, post.flush)
