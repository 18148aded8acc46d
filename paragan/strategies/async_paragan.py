"""ParaGAN: asynchronous training, where G and D step at once, each against a slightly older state of the other.

Shi, Li and You, "ParaGAN: A Scalable Distributed Training Framework for Generative Adversarial Networks", SoCC 2024,
arXiv 2411.03999. What surprises: D trains on the images that G made in its own turn, so no images are made for D alone.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal, Self

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
from paragan.strategies.base import Coordination, Role, Semantics, StrategyFields, assign_lanes
from paragan.strategies.gd_teams import TeamLinks, parse_split, split_ranks, validate_split
from paragan.strategies.lag_trace import read_lags
from paragan.strategies.sync import Feedback, Period, PeriodicSync, SyncMode, make_gradient_exchange

Lags = Annotated[LagPattern, Field(min_length=1)] | None
Split = Annotated[str, BeforeValidator(validate_split)]


@config_class
class Async(PeriodicSync):
    """G and D step at once. On several ranks some train G and some D: D trains on images that the ranks of G sent, G
    against the newest D that the ranks of D sent. On one rank, or with fixed lags, every rank trains both: D on the
    images of G's own turn, so that none are made for D alone.

    split            : how many ranks train G and how many D, "2:6"; "auto": so that neither waits; "none": all train
                       both
    max_lead_rounds  : how many rounds may be in progress at once; then the faster team waits. 1: both are in the same
                       round, and a run can be repeated bit for bit
    snapshot_every   : rounds of D between the snapshots that it sends
    snapshot_wire    : how snapshots are encoded for the network
    replay_policy    : which of the images that G made D trains on
    fake_lags        : how many rounds ago the newest of them were made; a list is repeated, step by step
    critic_lags      : how many rounds old the D is that G trains against (0: the current one)
    lags_from_run    : a run folder: use the lags that were recorded there (strategies/lag_trace.py)
    wire             : how gradients are encoded for the network
    feedback         : the fraction of what the wire loses that is sent with the next step (null: the default of the
                       wire)
    sync_period      : 2 or more: ranks agree with their team after every so many rounds only
    sync_mode        : how (`Sync`): "parameters", "gradients" or "accumulate"
    """

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
    sync_mode: SyncMode = "parameters"

    @property
    def optimizer_wrapper(self) -> str:
        return "optimistic"

    @property
    def extrapolation(self) -> float:
        return 2.0  # makes up for stepping at once and for a round of lag: docs/async.md

    @property
    def reuses_fakes(self) -> bool:
        return True

    @property
    def has_fixed_lags(self) -> bool:
        """Whether the ages of what players train against are given."""
        return self.fake_lags is not None or self.critic_lags is not None

    @property
    def splits_ranks(self) -> bool:
        return self.split != "none" and not self.has_fixed_lags

    @property
    def has_auto_split(self) -> bool:
        return self.split == "auto" and not self.has_fixed_lags

    @property
    def coordination(self) -> Coordination:
        return "teams"

    @property
    def semantics(self) -> Semantics:
        return "periodic" if self.sync_period > 1 else "stale"

    @property
    def traffic_period(self) -> int:
        return math.lcm(self.sync_period, self.snapshot_every)

    @property
    def mean_lags(self) -> tuple[float, float]:
        fake_lags, critic_lags = self._lag_patterns()
        return sum(fake_lags) / len(fake_lags), sum(critic_lags) / len(critic_lags)

    def with_recorded_fields(self) -> Self:
        if not self.lags_from_run:
            return self
        if self.has_fixed_lags:
            raise UsageError(
                f"strategy.lags_from_run={self.lags_from_run}: gives both lags. Leave it out, or leave out "
                "strategy.fake_lags and strategy.critic_lags."
            )
        fake_lags, critic_lags = read_lags(self.lags_from_run)
        return replace(self, fake_lags=fake_lags, critic_lags=critic_lags, lags_from_run="")

    def on_one_rank(self) -> Self:
        return replace(self, split="auto") if ":" in self.split else self

    def can_resume_from(self, previous: StrategyFields) -> bool:
        if not isinstance(previous, Async) or (previous.split == "none") != (self.split == "none"):
            return False
        return replace(self, split=previous.split) == previous

    def check(self, ranks: int) -> None:
        if ":" not in self.split:
            return
        g, d = parse_split(self.split)
        if g + d != ranks:
            fitting = (
                f"Use {ranks // 2}:{ranks - ranks // 2}." if ranks > 1 else f"Start {g + d} ranks, or leave it out."
            )
            started = "1 was" if ranks == 1 else f"{ranks} were"
            raise UsageError(f"strategy.split={self.split}: needs {g + d} ranks, and {started} started. {fitting}")
        if self.has_fixed_lags or self.lags_from_run:
            raise UsageError(
                f"strategy.split={self.split}: fixed lags are for ranks that train both players. Leave it out, or "
                "strategy.fake_lags, strategy.critic_lags and strategy.lags_from_run."
            )

    def role(self, game: Game, world: World, lanes: int) -> Role:
        is_split = world.size > 1 and self.splits_ranks
        role = self._split_role(game, world, lanes) if is_split else self._colocated_role(game, world, lanes)
        return self.accumulating(role)

    def _exchange_args(self, player: Player, team: Group, weight: float) -> tuple[Exchange, Group, float]:
        """Return the last arguments of a turn: exchange, team and weight."""
        metered = team.with_meter(player.meter)
        exchange = make_gradient_exchange(self.wire, metered, self.feedback, self.sync_period, weight, self.sync_mode)
        return exchange, SingleRankGroup() if self.replicas_drift else metered, weight

    def _colocated_role(self, game: Game, world: World, lanes: int) -> Role:
        """Every rank trains both players, and averages gradients with all the others."""
        team = world.all_ranks
        share = assign_lanes(lanes, world.rank, world.size)
        fake_lags, critic_lags = self._lag_patterns()
        fakes = FakeReplayBuffer(
            self.replay_policy,
            lambda k: get_lag(fake_lags, k),
            max(fake_lags),
            game.g_to_d_batch_ratio,
            game.objective.replayed_fields,
        )
        critic = StaleDiscriminator(game.d, lambda k: get_lag(critic_lags, k), max(critic_lags))
        d = game.d_turn(fakes, *self._exchange_args(game.d, team, share.weight))
        g = game.g_turn(critic, *self._exchange_args(game.g, team, share.weight), fakes.push)
        return Role(
            simultaneous_reuse_fakes(d, g, game.d_steps),
            share,
            replicated=not self.replicas_drift or team.size == 1,
            extra_fakes_for_d=False,
            replay_state=(fakes, critic),
            staleness={"fakes": fakes.staleness, "critic": critic.staleness},
        )

    def _lag_patterns(self) -> tuple[LagPattern, LagPattern]:
        return self.fake_lags or (0,), self.critic_lags or (0,)

    def _split_role(self, game: Game, world: World, lanes: int) -> Role:
        """Train one player on this rank, and average gradients with the ranks that train it too."""
        codec = SnapshotCodec(game.d, self.snapshot_every, self.snapshot_wire)
        links = TeamLinks(game, world, lanes, split_ranks(self.split, game, world), self.max_lead_rounds, codec)
        team = links.team
        share = links.share
        if links.plays_g:
            fake_sender = links.make_fake_sender()
            critic = links.make_snapshot_receiver()
            g = game.g_turn(critic, *self._exchange_args(game.g, team, share.weight), fake_sender)
            role = Role(
                ((replace(g, needs_new_reals=True),),),
                share,
                replay_state=(critic,),
                staleness={"critic": critic.staleness},
            )
            return links.to_role(role, not self.replicas_drift, fake_sender.flush, critic.drain)
        receiver = links.make_fake_receiver()
        snapshot_sender = links.make_snapshot_sender()
        fakes = FakeReplayBuffer(
            self.replay_policy,
            receiver.lag,
            self.max_lead_rounds - 1,
            game.g_to_d_batch_ratio,
            game.objective.replayed_fields,
        )
        receiver.replay_buffer = fakes
        d = game.d_turn(fakes, *self._exchange_args(game.d, team, share.weight))
        *before, (last,) = d.repeated(game.d_steps)
        groups = (*before, (replace(last, on_step_end=snapshot_sender),))
        role = Role(groups, share, replay_state=(fakes,), staleness={"fakes": fakes.staleness})
        return links.to_role(role, not self.replicas_drift, receiver.drain, snapshot_sender.flush)
