"""Play some rounds of a run in simulated time: the strategy's roles, turns, exchanges and mailboxes, unchanged.

Each rank is a task that builds its role on a `SimulatedWorld` and plays rounds of a `SimulatedGame`. Nothing is random
unless `slowdown` is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paragan.comm.bucket import Bucket
from paragan.core.types import Batch
from paragan.game.player import Player
from paragan.game.turn import Turn, TurnGroup, play_turn_groups
from paragan.plan.links import Links
from paragan.plan.predict.event_loop import SimClock, Task
from paragan.plan.predict.network import Network
from paragan.plan.predict.rank_clock import CODEC, COMPUTE, RankClock
from paragan.plan.predict.simulated_game import (
    BucketSizes,
    Pace,
    PlannedRun,
    SimulatedGame,
    TurnTimes,
    d_fakes_s,
    make_simulated_game,
    skip_start,
    turn_times,
)
from paragan.plan.predict.simulated_world import Message, SimulatedLinks, SimulatedWorld
from paragan.plan.predict.skip_compute import ChargedExchange, SkipComputeMode, with_charged_wires
from paragan.plan.profile.codec_cost import DEFAULT_CODEC_COST
from paragan.plan.profile.profile import Profile
from paragan.strategies.base import Role
from paragan.strategies.gd_teams import balance

Slowdown = Callable[[int, int], float]  # (rank, round) -> factor on its computing time
MAX_MESSAGES = 60_000  # bound on the simulated messages of all collectives
MIN_SEGMENTS = 8  # of each collective


def no_jitter(rank: int, step: int) -> float:
    """Default slowdown: none."""
    return 1.0


@dataclass(frozen=True)
class RankTimeline:
    """The timed rounds of one rank.

    start_s, end_s       : since the beginning of the simulation
    staleness_rounds     : ages of what it used of others, where they are not given
    exchange_state_bytes : memory that its exchanges keep between steps
    """

    start_s: float
    end_s: float
    rounds_s: tuple[float, ...]
    compute_s: float
    codec_s: float
    sent_bytes: int
    messages: int
    staleness_rounds: tuple[int, ...]
    exchange_state_bytes: int


@dataclass(frozen=True)
class Simulation:
    """Rounds of a run on some ranks.

    rounds         : their numbers; those left out take as long as rounds in which nothing is sent
    warm_up_rounds : at the beginning, which are not timed
    slowdown       : (rank, round) -> factor on the computing time
    """

    run: PlannedRun
    profile: Profile
    ranks: int
    rounds: Sequence[int]
    warm_up_rounds: int = 2
    slowdown: Slowdown = no_jitter

    def play(self, links: Links, num_played: int) -> list[RankTimeline]:
        """Play the first `num_played` ranks: all, or those of the first host if all hosts do the same.

        Raises:
            Deadlock: a round never ends.
        """
        clock = SimClock()
        max_segments = self._max_segments(num_played)
        network = Network(clock, links, self.ranks, symmetric=num_played < self.ranks, max_segments=max_segments)
        shared = SimulatedLinks(clock, network, num_playing=num_played)
        players = [_RankPlayer(self, rank, shared) for rank in range(num_played)]
        for player in players:
            clock.start_task(f"rank {player.rank}", player.play)
        _run(clock)
        return [player.timeline() for player in players]

    def record(self, rank: int) -> list[Message]:
        """Return what a rank sends in these rounds, if every message arrives at once."""
        clock = SimClock()
        log: list[Message] = []
        clock.start_task(f"rank {rank}", _RankPlayer(self, rank, SimulatedLinks(clock, None), log).play)
        _run(clock)
        return log

    @functools.cached_property
    def bucket_sizes(self) -> BucketSizes:
        """The buckets of the players."""
        return BucketSizes.of(self.run, self.profile)

    def _max_segments(self, num_played: int) -> int:
        """Return the segments per collective that keep the number of messages in bounds."""
        buckets = len(self.bucket_sizes.g) + self.run.d_steps * len(self.bucket_sizes.d)
        return max(MIN_SEGMENTS, MAX_MESSAGES // (2 * len(self.rounds) * buckets * num_played))


def _run(clock: SimClock) -> None:
    """Run all tasks, and leave torch as it was.

    torch counts modes per process: this one is entered first and left last, so no other one stays. Random numbers that
    an exchange of a user draws are the same in every simulation.
    """
    with SkipComputeMode(lambda op, numel: None), torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(0)
        clock.run()


class _RankPlayer:
    """A rank of a simulation: builds its role, plays its rounds and marks what it has spent and sent."""

    def __init__(self, simulation: Simulation, rank: int, links: SimulatedLinks, log: list[Message] | None = None):
        self.simulation = simulation
        self.rank = rank
        self.links = links
        self.log = log
        self._marks: list[tuple[float, float, float, int, int]] = []  # time, compute, codec, bytes, messages
        self._ages: list[int] = []

    def play(self, task: Task) -> None:
        """Play all rounds."""
        simulation = self.simulation
        clock = RankClock(task, DEFAULT_CODEC_COST | dict(simulation.profile.codec_cost))
        mode = SkipComputeMode(clock.run_codec)
        pace = Pace(clock)
        with mode:
            world = SimulatedWorld(simulation.ranks, self.rank, self.links, clock, self.log)
            run = simulation.run
            self.game = make_simulated_game(run, simulation.profile, simulation.bucket_sizes, pace)
            role: Role = with_charged_wires(run.strategy, clock.run_codec).role(self.game, world, run.lanes)
            pace.times = {player.name: self._turn_times(player, role) for player in self.game.players}
            groups = [tuple(_charged(turn, mode) for turn in group) for group in role.round]
            reals = [self.game.make_reals(role.share.lanes)]
            for i, step in enumerate(simulation.rounds):
                if i == simulation.warm_up_rounds:
                    clock.link_ages.clear()
                    for stats in role.staleness.values():
                        stats.pop()
                self._mark(clock)
                self._play_round(groups, reals, clock, step)
            self._mark(clock)
            self._ages = self._collect_ages(role, clock)
            self.links.num_playing -= 1
            task.may_stop = True
            while role.barrier and self.links.num_playing:  # others may wait for what it sends in later rounds
                step += 1
                self._play_round(groups, reals, clock, step)
                clock.catch_up()

    def _play_round(self, groups: Sequence[TurnGroup], reals: Sequence[Batch], clock: RankClock, step: int) -> None:
        clock.step = step
        clock.slowdown = self.simulation.slowdown(self.rank, step)
        for _ in play_turn_groups(groups, lambda turns: reals, step, step, 1):
            pass

    def _collect_ages(self, role: Role, clock: RankClock) -> list[int]:
        if role.is_split:
            return [lag for stats in role.staleness.values() for lag in stats.lags.values()]
        return [*clock.link_ages]

    def timeline(self) -> RankTimeline:
        """Return what it did after the warm-up rounds."""
        marks = self._marks[self.simulation.warm_up_rounds :]
        compute_s, codec_s, sent_bytes, messages = (
            end - start for start, end in zip(marks[0][1:], marks[-1][1:], strict=True)
        )
        times = [mark[0] for mark in marks]
        return RankTimeline(
            start_s=times[0],
            end_s=times[-1],
            rounds_s=tuple(b - a for a, b in itertools.pairwise(times)),
            compute_s=compute_s,
            codec_s=codec_s,
            sent_bytes=round(sent_bytes),
            messages=round(messages),
            staleness_rounds=tuple(self._ages),
            exchange_state_bytes=_exchange_state_bytes(self.game),
        )

    def _turn_times(self, player: Player, role: Role) -> TurnTimes:
        batch = self.simulation.run.batch * len(role.share.lanes) / self.simulation.run.lanes
        numels = [numel for _, numel in player.flat.slices]
        return turn_times(self.simulation.profile, player.name, batch, numels)

    def _mark(self, clock: RankClock) -> None:
        now_s = clock.catch_up()
        meters = [player.meter for player in self.game.players]
        sent_bytes = sum(meter.sent_bytes for meter in meters)
        messages = sum(meter.messages for meter in meters)
        self._marks.append((now_s, clock.spent_s[COMPUTE], clock.spent_s[CODEC], sent_bytes, messages))


def _charged(turn: Turn, mode: SkipComputeMode) -> Turn:
    """Return a turn whose exchange, and what follows its step, are charged."""

    def on_step_end(step: int) -> None:
        with mode.charging():
            turn.on_step_end(step)

    return replace(turn, exchange=ChargedExchange(turn.exchange, mode), on_step_end=on_step_end)


def _exchange_state_bytes(game: SimulatedGame) -> int:
    """Return the bytes that exchanges keep between steps."""

    def state_bytes(bucket: Bucket) -> int:
        tensors = (*bucket.states.values(), *bucket._workspaces.values())
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    return sum(state_bytes(bucket) for player in game.players for bucket in player.flat.buckets)


def with_balanced_split(run: PlannedRun, profile: Profile, ranks: int) -> Any:
    """Return the run with `split=auto` replaced by the split that the profile says is balanced."""
    if ranks == 1 or not run.strategy.has_auto_split:
        return run
    g = profile.turn("G", run.batch).total_s
    d = run.d_steps * skip_start(profile.turn("D", run.batch), d_fakes_s(profile, run.batch)).total_s
    strategy = dataclasses.replace(run.strategy, split="{}:{}".format(*balance(g, d, ranks)))
    return dataclasses.replace(run, strategy=strategy)  # pyright: ignore[reportArgumentType]
