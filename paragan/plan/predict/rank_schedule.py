"""What one rank does in a round, as far as time goes: turns and what they take, and what its exchanges send."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from paragan.comm.async_gossip import LateGossip
from paragan.comm.bucket import Exchange
from paragan.comm.exchange import Every
from paragan.comm.traffic import Traffic
from paragan.plan.cost import role_traffic
from paragan.plan.memory import imagined
from paragan.plan.predict.exchange_trace import NotingWorld, Pen, Rehearsal, Script, counting
from paragan.plan.predict.stub_game import Planned, stand_in
from paragan.plan.profile.profile import Profile
from paragan.plan.profile.profile import Turn as Timed
from paragan.strategies.base import Role
from paragan.strategies.gd_teams import even

Name = Literal["G", "D"]


@dataclass(frozen=True)
class Part:
    """A turn. Seconds of computing since it began.

    made    : G's images are there (G's turn)
    forward : all forward passes are over, and batch moments may travel
    filled  : the gradient of each bucket is there
    whole   : backward is over at `backward`; then come the optimizer and the average
    team    : the ranks that sum moments, `moments` bytes
    """

    player: Name
    made: float
    forward: float
    filled: tuple[float, ...]
    backward: float
    whole: float
    team: tuple[int, ...]
    moments: int


@dataclass(frozen=True)
class Lagging:
    """Links that may lag: the neighbours, and after how many steps a swap is waited for (comm/late.py)."""

    neighbours: tuple[int, ...]
    late: int
    tag: int
    sizes: tuple[int, ...]  # numbers of the buckets
    every: int


@dataclass(frozen=True)
class Posts:
    """What goes to the other team and comes from it (strategies/teams.py): bytes by rank; snapshots also by number."""

    team: tuple[int, ...]
    lead: int
    images_to: Mapping[int, int] = field(default_factory=dict[int, int])
    images_from: Mapping[int, int] = field(default_factory=dict[int, int])
    snapshots_to: tuple[int, ...] = ()
    snapshots_from: tuple[int, ...] = ()
    every: int = 1
    snapshot: int = 0  # bytes of one
    packed: Mapping[str, int] = field(default_factory=dict[str, int])  # numbers handled where one is made
    shown: Mapping[str, int] = field(default_factory=dict[str, int])  # and where one is taken in


@dataclass(frozen=True)
class Seat:
    """One rank. script: (player, step) -> one of every bucket;  lags: of what it sees of the other (patterns)."""

    rank: int
    beats: tuple[tuple[Part, ...], ...]
    script: Callable[[Name, int], Sequence[Script]]
    lagging: Mapping[Name, Lagging]
    posts: Posts | None
    traffic: Traffic
    kept: Callable[[], int]  # bytes that exchanges keep for themselves
    lags: tuple[float, ...] = ()


class Wiring:
    """The seats of a run on so many ranks."""

    def __init__(self, run: Planned, profile: Profile, ranks: int):
        self.run, self.profile, self.ranks, self.pen = run, profile, ranks, Pen()
        self.strategy = counting(divided(run, profile, ranks), self.pen)
        self.game = stand_in(run, profile)

    def seat(self, rank: int) -> Seat:
        with imagined():
            role: Role = self.strategy.role(self.game, NotingWorld(self.ranks, rank, self.pen), self.run.lanes)
        beats = tuple(tuple(self._part(role, turn) for turn in beat) for beat in role.round)
        exchanges: dict[Name, Exchange] = {_name(turn): turn.exchange for beat in role.round for turn in beat}
        rehearsals = {name: _Rehearsals(exchange, self._sizes(name), self.pen) for name, exchange in exchanges.items()}
        late: dict[Name, Lagging | None] = {
            name: _lagging(exchange, self._sizes(name)) for name, exchange in exchanges.items()
        }
        return Seat(
            rank=rank,
            beats=beats,
            script=lambda name, step: rehearsals[name].scripts(step),
            lagging={name: lagging for name, lagging in late.items() if lagging},
            posts=self._posts(role, rank) if role.teams else None,
            traffic=role_traffic(role, self.game),
            kept=lambda: sum(r.nbytes for r in rehearsals.values()),
            lags=tuple(_mean(getattr(self.strategy, f"{what}_lags", None)) for what in ("fake", "critic")),
        )

    def _sizes(self, name: Name) -> list[int]:
        return [bucket.grads.numel() for bucket in self._player(name).flat.buckets]

    def _player(self, name: Name) -> Any:
        return self.game.g if name == "G" else self.game.d

    def _part(self, role: Role, turn: Any) -> Part:
        name, sizes = _name(turn), self._sizes(_name(turn))
        batch = self.run.batch * len(role.share.lanes) / self.run.lanes
        timed, made = self.profile.turn(name, batch), made_s(self.profile, batch)
        if name == "D" and not role.for_d:
            timed = earlier(timed, spared_s(self.profile, batch))
        team = turn.team.members if turn.team.size > 1 else ()
        total, ends = sum(sizes), [sum(sizes[: i + 1]) for i in range(len(sizes))]
        filled = tuple(ready_at(timed, end / total) for end in ends)
        moments = 4 * self.profile.moments[name == "D"] if team else 0
        forward = min(filled[0], max(0.0, 2 * timed.ready[0] - timed.ready[min(1, len(timed.ready) - 1)]))
        return Part(name, made, forward, filled, timed.backward, timed.whole, team, moments)

    def _posts(self, role: Role, rank: int) -> Posts:
        """As Mail lays its links (strategies/teams.py)."""
        from paragan.strategies.base import deal

        g = role.speakers[1]
        teams = tuple(range(g)), tuple(range(g, self.ranks))
        mine, others = teams if rank < g else teams[::-1]
        per_lane = self._per_lane()
        shares = {r: set(deal(self.run.lanes, team.index(r), len(team)).lanes) for team in teams for r in team}
        images = {r: per_lane * len(both) for r in others if (both := shares[r] & shares[rank])}
        served = tuple(r for r in others if teams[1].index(max(r, rank)) == min(r, rank) % len(teams[1]))
        snapshots, numbers = self.strategy.snapshot_wire, self.profile.params[1]
        work = {word: {f"{snapshots.name}/{word}": numbers} if snapshots.lossy else {} for word in ("encode", "decode")}
        common = Posts(
            mine, self.strategy.lead, every=self.strategy.snapshot_every, snapshot=snapshots.nbytes(numbers),
            packed=work["encode"] | {"pass": numbers}, shown=work["decode"] | {"pass": numbers},
        )  # fmt: skip
        if rank < g:
            return dataclasses.replace(common, images_to=images, snapshots_from=served)
        return dataclasses.replace(common, images_from=images, snapshots_to=served)

    def _per_lane(self) -> int:
        """Bytes of the images that G makes for a lane, and their labels."""
        half, count = self.run.device.precision == "bf16", self.game.g_lane
        numbers = self.game.shape[0] * self.game.shape[1] * self.game.shape[2]
        return count * (numbers * (2 if half else 4) + (8 if self.game.labels is not None else 0))


class _Rehearsals:
    """One player's exchange on all of its buckets. Those of one size do the same."""

    def __init__(self, exchange: Exchange, sizes: Sequence[int], pen: Pen):
        self.sizes = sizes
        self._by_size = {size: Rehearsal(exchange, size, i, pen) for i, size in enumerate(sizes)}
        self._known: dict[int, list[Script]] = {}

    def scripts(self, step: int) -> list[Script]:
        if step not in self._known:
            found = {size: rehearsal.script(step) for size, rehearsal in self._by_size.items()}
            self._known[step] = [found[size] for size in self.sizes]
        return self._known[step]

    @property
    def nbytes(self) -> int:
        return sum(self._by_size[size].nbytes for size in self.sizes)


def _name(turn: Any) -> Name:
    return cast(Name, turn.player.name)


def _mean(pattern: Sequence[int] | None) -> float:
    return sum(pattern) / len(pattern) if pattern else 0.0


def _lagging(exchange: Any, sizes: Sequence[int]) -> Lagging | None:
    every, late = (exchange.period, exchange.inner) if isinstance(exchange, Every) else (1, exchange)
    if not isinstance(late, LateGossip):
        return None
    return Lagging(tuple(late.weights), late.late, late.tag, tuple(sizes), every)


def divided(run: Planned, profile: Profile, ranks: int) -> Any:
    """The run's strategy; where teams are to be divided evenly, divided by the profile."""
    if getattr(run.strategy, "split", None) != "auto" or ranks == 1 or run.strategy.lagging:
        return run.strategy
    g = profile.turn("G", run.batch).whole
    d = run.d_steps * earlier(profile.turn("D", run.batch), spared_s(profile, run.batch)).whole
    return dataclasses.replace(run.strategy, split="{}:{}".format(*even(g, d, ranks)))


def made_s(profile: Profile, batch: float) -> float:
    """Seconds into G's turn when its images are there. Where that was not measured, backward is taken to last twice
    as long as the forward pass."""
    turn = profile.turn("G", batch)
    if turn.made:
        return turn.made
    if len(turn.ready) < 2:
        return turn.backward / 5
    return min(turn.ready[0], (turn.ready[-1] - turn.ready[0]) * len(turn.ready) / (len(turn.ready) - 1) / 2)


def spared_s(profile: Profile, batch: float) -> float:
    """Seconds of D's turn in which G makes images for it."""
    return profile.turn("D", batch).made or made_s(profile, batch) / profile.ratio


def earlier(turn: Timed, seconds: float) -> Timed:
    """A turn without so much of its beginning."""
    less = min(seconds, turn.ready[0]) if turn.ready else 0.0
    ready = tuple(r - less for r in turn.ready)
    return dataclasses.replace(turn, ready=ready, backward=turn.backward - less, whole=turn.whole - less)


def ready_at(turn: Timed, share: float) -> float:
    """When this share of a player's vector has its gradients."""
    place = share * len(turn.ready) - 1
    below = min(len(turn.ready) - 1, max(0, int(place)))
    above = min(len(turn.ready) - 1, below + 1)
    part = min(1.0, max(0.0, place - below))
    return min(turn.backward, (1 - part) * turn.ready[below] + part * turn.ready[above])
