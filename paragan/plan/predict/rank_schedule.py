"""What one rank does in a round, as far as time goes: turns and what they take, and what its exchanges send."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from paragan.comm.async_gossip import AsyncGossip
from paragan.comm.bucket import Exchange
from paragan.comm.exchange import EveryN
from paragan.comm.traffic import Traffic
from paragan.plan.cost import role_traffic
from paragan.plan.memory import fake_tensor_mode
from paragan.plan.predict.exchange_trace import ExchangeTracer, TraceHandle, TraceOps, TracingWorld, with_traced_wire
from paragan.plan.predict.stub_game import PlannedRun, make_stub_game
from paragan.plan.profile.profile import Profile
from paragan.plan.profile.profile import TurnProfile as Timed
from paragan.strategies.base import Role
from paragan.strategies.gd_teams import balance

PlayerName = Literal["G", "D"]


@dataclass(frozen=True)
class TurnTiming:
    """A turn. Seconds of computing since it began.

    made    : G's images are there (G's turn)
    forward : all forward passes are over, and batch moments may travel
    filled  : the gradient of each bucket is there
    whole   : backward is over at `backward`; then come the optimizer and the average
    team    : the ranks that sum moments, `moments` bytes
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
    """Links that may lag: the neighbours, and after how many steps a swap is waited for (comm/late.py)."""

    neighbors: tuple[int, ...]
    max_staleness: int
    tag: int
    bucket_numels: tuple[int, ...]  # numbers of the buckets
    sync_period: int


@dataclass(frozen=True)
class TeamMessages:
    """What goes to the other team and comes from it (strategies/teams.py): bytes by rank; snapshots also by number."""

    team: tuple[int, ...]
    max_lead_rounds: int
    image_bytes_to: Mapping[int, int] = field(default_factory=dict[int, int])
    image_bytes_from: Mapping[int, int] = field(default_factory=dict[int, int])
    snapshot_targets: tuple[int, ...] = ()
    snapshot_sources: tuple[int, ...] = ()
    snapshot_period: int = 1
    snapshot_bytes: int = 0  # bytes of one
    pack_numel_by_op: Mapping[str, int] = field(default_factory=dict[str, int])  # numbers handled where one is made
    load_numel_by_op: Mapping[str, int] = field(default_factory=dict[str, int])  # and where one is taken in


@dataclass(frozen=True)
class RankSchedule:
    """One rank. script: (player, step) -> one of every bucket;  lags: of what it sees of the other (patterns)."""

    rank: int
    turn_groups: tuple[tuple[TurnTiming, ...], ...]
    exchange_ops: Callable[[PlayerName, int], Sequence[TraceOps]]
    async_links: Mapping[PlayerName, AsyncLinks]
    team_messages: TeamMessages | None
    traffic: Traffic
    exchange_state_bytes: Callable[[], int]  # bytes that exchanges keep for themselves
    mean_lags: tuple[float, ...] = ()


class ScheduleBuilder:
    """The seats of a run on so many ranks."""

    def __init__(self, run: PlannedRun, profile: Profile, ranks: int):
        self.run, self.profile, self.ranks, self.trace_handle = run, profile, ranks, TraceHandle()
        self.strategy = with_traced_wire(with_balanced_split(run, profile, ranks), self.trace_handle)
        self.game = make_stub_game(run, profile)

    def build(self, rank: int) -> RankSchedule:
        with fake_tensor_mode():
            role: Role = self.strategy.role(
                self.game, TracingWorld(self.ranks, rank, self.trace_handle), self.run.lanes
            )
        beats = tuple(tuple(self._turn_timing(role, turn) for turn in beat) for beat in role.round)
        exchanges: dict[PlayerName, Exchange] = {
            _player_name(turn): turn.exchange for beat in role.round for turn in beat
        }
        rehearsals = {
            name: _PlayerTracer(exchange, self._bucket_numels(name), self.trace_handle)
            for name, exchange in exchanges.items()
        }
        late: dict[PlayerName, AsyncLinks | None] = {
            name: _make_async_links(exchange, self._bucket_numels(name)) for name, exchange in exchanges.items()
        }
        return RankSchedule(
            rank=rank,
            turn_groups=beats,
            exchange_ops=lambda name, step: rehearsals[name].trace_step(step),
            async_links={name: lagging for name, lagging in late.items() if lagging},
            team_messages=self._team_messages(role, rank) if role.is_split else None,
            traffic=role_traffic(role, self.game),
            exchange_state_bytes=lambda: sum(r.state_bytes for r in rehearsals.values()),
            mean_lags=self.strategy.mean_lags,
        )

    def _bucket_numels(self, name: PlayerName) -> list[int]:
        return [bucket.grads.numel() for bucket in self._player(name).flat.buckets]

    def _player(self, name: PlayerName) -> Any:
        return self.game.g if name == "G" else self.game.d

    def _turn_timing(self, role: Role, turn: Any) -> TurnTiming:
        name, sizes = _player_name(turn), self._bucket_numels(_player_name(turn))
        batch = self.run.batch * len(role.share.lanes) / self.run.lanes
        timed, made = self.profile.turn(name, batch), fakes_ready_s(self.profile, batch)
        if name == "D" and not role.extra_fakes_for_d:
            timed = skip_start(timed, d_fakes_s(self.profile, batch))
        team = turn.team.members if turn.team.size > 1 else ()
        total, ends = sum(sizes), [sum(sizes[: i + 1]) for i in range(len(sizes))]
        filled = tuple(grads_ready_s(timed, end / total) for end in ends)
        moments = 4 * self.profile.moments_numel[name == "D"] if team else 0
        forward = min(
            filled[0], max(0.0, 2 * timed.grads_ready_s[0] - timed.grads_ready_s[min(1, len(timed.grads_ready_s) - 1)])
        )
        return TurnTiming(name, made, forward, filled, timed.backward_s, timed.total_s, team, moments)

    def _team_messages(self, role: Role, rank: int) -> TeamMessages:
        """As Mail lays its links (strategies/teams.py)."""
        from paragan.strategies.base import assign_lanes

        g = role.owner_ranks[1]
        teams = tuple(range(g)), tuple(range(g, self.ranks))
        mine, others = teams if rank < g else teams[::-1]
        per_lane = self._image_bytes_per_lane()
        shares = {r: set(assign_lanes(self.run.lanes, team.index(r), len(team)).lanes) for team in teams for r in team}
        images = {r: per_lane * len(both) for r in others if (both := shares[r] & shares[rank])}
        served = tuple(r for r in others if teams[1].index(max(r, rank)) == min(r, rank) % len(teams[1]))
        snapshots, numbers = self.strategy.snapshot_wire, self.profile.num_params[1]
        work = {word: {f"{snapshots.name}/{word}": numbers} if snapshots.lossy else {} for word in ("encode", "decode")}
        common = TeamMessages(
            mine, self.strategy.max_lead_rounds, snapshot_period=self.strategy.snapshot_every, snapshot_bytes=snapshots.nbytes(numbers),
            pack_numel_by_op=work["encode"] | {"pass": numbers}, load_numel_by_op=work["decode"] | {"pass": numbers},
        )  # fmt: skip
        if rank < g:
            return dataclasses.replace(common, image_bytes_to=images, snapshot_sources=served)
        return dataclasses.replace(common, image_bytes_from=images, snapshot_targets=served)

    def _image_bytes_per_lane(self) -> int:
        """Bytes of the images that G makes for a lane, and their labels."""
        half, count = self.run.device.precision == "bf16", self.game.g_lane_batch
        numbers = self.game.shape[0] * self.game.shape[1] * self.game.shape[2]
        return count * (numbers * (2 if half else 4) + (8 if self.game.labels is not None else 0))


class _PlayerTracer:
    """One player's exchange on all of its buckets. Those of one size do the same."""

    def __init__(self, exchange: Exchange, bucket_numels: Sequence[int], trace_handle: TraceHandle):
        self.bucket_numels = bucket_numels
        self._tracers = {size: ExchangeTracer(exchange, size, i, trace_handle) for i, size in enumerate(bucket_numels)}
        self._cached_ops: dict[int, list[TraceOps]] = {}

    def trace_step(self, step: int) -> list[TraceOps]:
        if step not in self._cached_ops:
            found = {size: rehearsal.trace_step(step) for size, rehearsal in self._tracers.items()}
            self._cached_ops[step] = [found[size] for size in self.bucket_numels]
        return self._cached_ops[step]

    @property
    def state_bytes(self) -> int:
        return sum(self._tracers[size].state_bytes for size in self.bucket_numels)


def _player_name(turn: Any) -> PlayerName:
    return cast(PlayerName, turn.player.name)


def _make_async_links(exchange: Any, bucket_numels: Sequence[int]) -> AsyncLinks | None:
    every, late = (exchange.period, exchange.inner) if isinstance(exchange, EveryN) else (1, exchange)
    if not isinstance(late, AsyncGossip):
        return None
    return AsyncLinks(tuple(late.weights), late.max_staleness, late.tag, tuple(bucket_numels), every)


def with_balanced_split(run: PlannedRun, profile: Profile, ranks: int) -> Any:
    """The run's strategy; where teams are to be divided evenly, divided by the profile."""
    if ranks == 1 or not run.strategy.has_auto_split:
        return run.strategy
    g = profile.turn("G", run.batch).total_s
    d = run.d_steps * skip_start(profile.turn("D", run.batch), d_fakes_s(profile, run.batch)).total_s
    return dataclasses.replace(run.strategy, split="{}:{}".format(*balance(g, d, ranks)))


def fakes_ready_s(profile: Profile, batch: float) -> float:
    """Seconds into G's turn when its images are there. Where that was not measured, backward is taken to last twice
    as long as the forward pass."""
    turn = profile.turn("G", batch)
    if turn.g_forward_s:
        return turn.g_forward_s
    if len(turn.grads_ready_s) < 2:
        return turn.backward_s / 5
    return min(
        turn.grads_ready_s[0],
        (turn.grads_ready_s[-1] - turn.grads_ready_s[0]) * len(turn.grads_ready_s) / (len(turn.grads_ready_s) - 1) / 2,
    )


def d_fakes_s(profile: Profile, batch: float) -> float:
    """Seconds of D's turn in which G makes images for it."""
    return profile.turn("D", batch).g_forward_s or fakes_ready_s(profile, batch) / profile.g_batch_ratio


def skip_start(turn: Timed, seconds: float) -> Timed:
    """A turn without so much of its beginning."""
    less = min(seconds, turn.grads_ready_s[0]) if turn.grads_ready_s else 0.0
    ready = tuple(r - less for r in turn.grads_ready_s)
    return dataclasses.replace(
        turn, grads_ready_s=ready, backward_s=turn.backward_s - less, total_s=turn.total_s - less
    )


def grads_ready_s(turn: Timed, fraction: float) -> float:
    """When this share of a player's vector has its gradients."""
    place = fraction * len(turn.grads_ready_s) - 1
    below = min(len(turn.grads_ready_s) - 1, max(0, int(place)))
    above = min(len(turn.grads_ready_s) - 1, below + 1)
    part = min(1.0, max(0.0, place - below))
    return min(turn.backward_s, (1 - part) * turn.grads_ready_s[below] + part * turn.grads_ready_s[above])
