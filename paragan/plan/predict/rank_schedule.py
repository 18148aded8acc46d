"""The schedule of one rank: how long its turns take, and what its exchanges send.

The strategy itself builds the role of the rank, in a game of stub networks (plan/predict/stub_game.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from paragan.comm.async_gossip import AsyncGossip
from paragan.comm.bucket import Exchange
from paragan.comm.exchange import EveryN, for_later_turns
from paragan.comm.traffic import Traffic
from paragan.plan.cost import role_traffic
from paragan.plan.memory import fake_tensor_mode
from paragan.plan.predict.exchange_trace import ExchangeTracer, TraceHandle, TraceOps, TracingWorld, with_traced_wire
from paragan.plan.predict.stub_game import PlannedRun, make_stub_game
from paragan.plan.profile.profile import Profile, TurnProfile
from paragan.strategies.base import Role, assign_lanes
from paragan.strategies.gd_teams import balance

PlayerName = Literal["G", "D"]


@dataclass(frozen=True)
class TurnTiming:
    """Times of one turn, in seconds of computing since it began.

    fakes_ready_s   : G's images are ready (G's turn)
    forward_s       : all forward passes are done, and batch moments can be sent
    buckets_ready_s : the gradient of each bucket is ready
    backward_s      : the backward pass is done; the optimizer and the average follow
    total_s         : the turn is done
    team            : the ranks that sum batch moments, of moments_bytes bytes
    """

    player: PlayerName
    fakes_ready_s: float
    forward_s: float
    buckets_ready_s: tuple[float, ...]
    backward_s: float
    total_s: float
    team: tuple[int, ...]
    moments_bytes: int


@dataclass(frozen=True)
class AsyncLinks:
    """Links of asynchronous gossip (comm/async_gossip.py)."""

    neighbors: tuple[int, ...]
    max_staleness: int  # steps after which a rank waits for a swap
    tag: int
    bucket_numels: tuple[int, ...]
    sync_period: int


@dataclass(frozen=True)
class TeamMessages:
    """Messages between the teams of G and D (strategies/gd_teams.py)."""

    team: tuple[int, ...]
    max_lead_rounds: int
    image_bytes_to: Mapping[int, int] = field(default_factory=dict[int, int])  # by rank
    image_bytes_from: Mapping[int, int] = field(default_factory=dict[int, int])  # by rank
    snapshot_targets: tuple[int, ...] = ()
    snapshot_sources: tuple[int, ...] = ()
    snapshot_period: int = 1
    snapshot_bytes: int = 0  # of one snapshot
    pack_numel_by_op: Mapping[str, int] = field(default_factory=dict[str, int])  # to make a snapshot
    load_numel_by_op: Mapping[str, int] = field(default_factory=dict[str, int])  # to load one


@dataclass(frozen=True)
class RankSchedule:
    """Everything that one rank does in a round.

    exchange_ops         : (player, step, is_first_turn) -> the operations of the exchange on each bucket, in the
                           player's first turn of a round or in a later one
    traffic              : what the rank sends in a round, as the exchanges predict it
    exchange_state_bytes : memory that the exchanges keep between steps
    mean_lags            : mean lags of fakes and critic, in rounds, of strategies that prescribe them
    """

    rank: int
    turn_groups: tuple[tuple[TurnTiming, ...], ...]
    exchange_ops: Callable[[PlayerName, int, bool], Sequence[TraceOps]]
    async_links: Mapping[PlayerName, AsyncLinks]
    team_messages: TeamMessages | None
    traffic: Traffic
    exchange_state_bytes: Callable[[], int]
    mean_lags: tuple[float, ...] = ()


class ScheduleBuilder:
    """Builds the schedules of a run on `ranks` ranks."""

    def __init__(self, run: PlannedRun, profile: Profile, ranks: int):
        self.run = run
        self.profile = profile
        self.ranks = ranks
        self.trace_handle = TraceHandle()
        self.strategy = with_traced_wire(with_balanced_split(run, profile, ranks), self.trace_handle)
        self.game = make_stub_game(run, profile)

    def build(self, rank: int) -> RankSchedule:
        """Build the schedule of one rank."""
        world = TracingWorld(self.ranks, rank, self.trace_handle)
        with fake_tensor_mode():
            role: Role = self.strategy.role(self.game, world, self.run.lanes)
        exchanges: dict[PlayerName, Exchange] = {
            _player_name(turn): turn.exchange for group in reversed(role.round) for turn in group
        }
        tracers: dict[PlayerName, _PlayerTracer] = {}
        later_tracers: dict[PlayerName, _PlayerTracer] = {}
        async_links: dict[PlayerName, AsyncLinks] = {}
        for name, exchange in exchanges.items():
            numels = self._bucket_numels(name)
            tracers[name] = _PlayerTracer(exchange, numels, self.trace_handle)
            later = for_later_turns(exchange)
            later_tracers[name] = tracers[name]
            if later is not exchange:
                later_tracers[name] = _PlayerTracer(later, numels, self.trace_handle)
            links = _make_async_links(exchange, numels)
            if links:
                async_links[name] = links

        def exchange_ops(name: PlayerName, step: int, is_first_turn: bool) -> Sequence[TraceOps]:
            return (tracers if is_first_turn else later_tracers)[name].trace_step(step)

        return RankSchedule(
            rank=rank,
            turn_groups=tuple(tuple(self._turn_timing(role, turn) for turn in group) for group in role.round),
            exchange_ops=exchange_ops,
            async_links=async_links,
            team_messages=self._team_messages(role, rank) if role.is_split else None,
            traffic=role_traffic(role, self.game),
            exchange_state_bytes=lambda: sum(tracer.state_bytes for tracer in tracers.values()),
            mean_lags=self.strategy.mean_lags,
        )

    def _bucket_numels(self, name: PlayerName) -> list[int]:
        return [bucket.grads.numel() for bucket in self._player(name).flat.buckets]

    def _player(self, name: PlayerName) -> Any:
        return self.game.g if name == "G" else self.game.d

    def _turn_timing(self, role: Role, turn: Any) -> TurnTiming:
        name = _player_name(turn)
        batch = self.run.batch * len(role.share.lanes) / self.run.lanes
        profile = self.profile.turn(name, batch)
        if name == "D" and not role.extra_fakes_for_d:
            profile = skip_start(profile, d_fakes_s(self.profile, batch))
        numels = self._bucket_numels(name)
        total = sum(numels)
        ends = [sum(numels[: i + 1]) for i in range(len(numels))]
        buckets_ready_s = tuple(grads_ready_s(profile, end / total) for end in ends)
        # The forward pass ends about one part of the gradient before the first part is ready.
        ready = profile.grads_ready_s
        forward_s = max(0.0, 2 * ready[0] - ready[min(1, len(ready) - 1)])
        team = turn.team.members if turn.team.size > 1 else ()
        return TurnTiming(
            player=name,
            fakes_ready_s=fakes_ready_s(self.profile, batch),
            forward_s=min(buckets_ready_s[0], forward_s),
            buckets_ready_s=buckets_ready_s,
            backward_s=profile.backward_s,
            total_s=profile.total_s,
            team=team,
            moments_bytes=4 * self.profile.moments_numel[name == "D"] if team else 0,
        )

    def _team_messages(self, role: Role, rank: int) -> TeamMessages:
        """Follow TeamLinks of strategies/gd_teams.py."""
        g = role.owner_ranks[1]
        teams = tuple(range(g)), tuple(range(g, self.ranks))
        team, others = teams if rank < g else teams[::-1]
        per_lane = self._image_bytes_per_lane()
        shares = {r: set(assign_lanes(self.run.lanes, team.index(r), len(team)).lanes) for team in teams for r in team}
        images = {r: per_lane * len(common) for r in others if (common := shares[r] & shares[rank])}
        peers = tuple(r for r in others if teams[1].index(max(r, rank)) == min(r, rank) % len(teams[1]))
        wire = self.strategy.snapshot_wire
        numel = self.profile.num_params[1]
        pack = {"pass": numel}
        load = {"pass": numel}
        if wire.lossy:
            pack = {f"{wire.name}/encode": numel} | pack
            load = {f"{wire.name}/decode": numel} | load
        messages = TeamMessages(
            team=team,
            max_lead_rounds=self.strategy.max_lead_rounds,
            snapshot_period=self.strategy.snapshot_every,
            snapshot_bytes=wire.nbytes(numel),
            pack_numel_by_op=pack,
            load_numel_by_op=load,
        )
        if rank < g:
            return dataclasses.replace(messages, image_bytes_to=images, snapshot_sources=peers)
        return dataclasses.replace(messages, image_bytes_from=images, snapshot_targets=peers)

    def _image_bytes_per_lane(self) -> int:
        """Return the bytes of the images that G makes for a lane, and of their labels."""
        channels, height, width = self.game.shape
        bytes_per_number = 2 if self.run.device.precision == "bf16" else 4
        label_bytes = 0 if self.game.labels is None else 8
        return self.game.g_lane_batch * (channels * height * width * bytes_per_number + label_bytes)


class _PlayerTracer:
    """Traces one player's exchange on all of its buckets. Buckets of one size are traced once."""

    def __init__(self, exchange: Exchange, bucket_numels: Sequence[int], trace_handle: TraceHandle):
        self.bucket_numels = bucket_numels
        self._tracers = {size: ExchangeTracer(exchange, size, i, trace_handle) for i, size in enumerate(bucket_numels)}
        self._cached_ops: dict[int, list[TraceOps]] = {}

    def trace_step(self, step: int) -> list[TraceOps]:
        if step not in self._cached_ops:
            ops = {size: tracer.trace_step(step) for size, tracer in self._tracers.items()}
            self._cached_ops[step] = [ops[size] for size in self.bucket_numels]
        return self._cached_ops[step]

    @property
    def state_bytes(self) -> int:
        return sum(self._tracers[size].state_bytes for size in self.bucket_numels)


def _player_name(turn: Any) -> PlayerName:
    return cast(PlayerName, turn.player.name)


def _make_async_links(exchange: Any, bucket_numels: Sequence[int]) -> AsyncLinks | None:
    sync_period = 1
    if isinstance(exchange, EveryN):
        sync_period = exchange.period
        exchange = exchange.inner
    if not isinstance(exchange, AsyncGossip):
        return None
    neighbors = tuple(exchange.weights)
    return AsyncLinks(neighbors, exchange.max_staleness, exchange.tag, tuple(bucket_numels), sync_period)


def with_balanced_split(run: PlannedRun, profile: Profile, ranks: int) -> Any:
    """Return the run's strategy, with `split=auto` replaced by the split that the profile says is balanced."""
    if ranks == 1 or not run.strategy.has_auto_split:
        return run.strategy
    g = profile.turn("G", run.batch).total_s
    d = run.d_steps * skip_start(profile.turn("D", run.batch), d_fakes_s(profile, run.batch)).total_s
    return dataclasses.replace(run.strategy, split="{}:{}".format(*balance(g, d, ranks)))


def fakes_ready_s(profile: Profile, batch: float) -> float:
    """Return the seconds from the start of G's turn until its images are ready.

    If that was not measured, the backward pass is assumed to take twice as long as the forward pass.
    """
    turn = profile.turn("G", batch)
    if turn.g_forward_s:
        return turn.g_forward_s
    ready = turn.grads_ready_s
    if len(ready) < 2:
        return turn.backward_s / 5
    return min(ready[0], (ready[-1] - ready[0]) * len(ready) / (len(ready) - 1) / 2)


def d_fakes_s(profile: Profile, batch: float) -> float:
    """Return the seconds of D's turn in which G makes images for it."""
    return profile.turn("D", batch).g_forward_s or fakes_ready_s(profile, batch) / profile.g_batch_ratio


def skip_start(turn: TurnProfile, seconds: float) -> TurnProfile:
    """Return the turn without its first `seconds`, at most until its first gradients are ready."""
    skipped_s = min(seconds, turn.grads_ready_s[0]) if turn.grads_ready_s else 0.0
    return dataclasses.replace(
        turn,
        grads_ready_s=tuple(ready - skipped_s for ready in turn.grads_ready_s),
        backward_s=turn.backward_s - skipped_s,
        total_s=turn.total_s - skipped_s,
    )


def grads_ready_s(turn: TurnProfile, fraction: float) -> float:
    """Return when this fraction of a player's flat vector has its gradients, by linear interpolation."""
    ready = turn.grads_ready_s
    position = fraction * len(ready) - 1
    below = min(len(ready) - 1, max(0, int(position)))
    above = min(len(ready) - 1, below + 1)
    weight = min(1.0, max(0.0, position - below))
    return min(turn.backward_s, (1 - weight) * ready[below] + weight * ready[above])
