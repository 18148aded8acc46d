"""Rounds of up to 100,000 workers, as arrays: each begins when it is done and what it waits for has arrived.

seen = simulate(strategy_of("gossip"), job, Crowd(100_000, up=2.5e6, down=12.5e6, latency=0.04, leaving=0.01))
seen.images_per_s, seen.sent_bytes_per_h, seen.apart

Workers differ, vary from round to round, leave and are replaced by others who fetch the state from one who is there;
all of it by seed. What ranks hold is one number each, moved by 1 a step at random and mixed as parameters are: `apart`
is how far ranks are from their mean, in steps. docs/planning.md says what is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paragan.core.errors import UsageError
from paragan.core.rng import philox_generator
from paragan.plan.large_scale.mixing_rate import rounds_to_contract
from paragan.plan.large_scale.round_time import AllReduceModel, WorkerRound
from paragan.plan.links import DEFAULT_INTRA_HOST_LINK, Link
from paragan.strategies.async_paragan import Async
from paragan.strategies.gd_teams import balance, parse_split

FloatArray = NDArray[np.float64]
SECONDS_PER_HOUR = 3600.0
WARM_UP_ROUNDS = 8  # rounds
NUM_TRACES = 8  # numbers of which ranks hold one each
MAX_ATTEMPTS = 1e4  # attempts after which a round is said never to end


@dataclass(frozen=True)
class FleetConfig:
    """Workers and what lies between them.

    up, down : bytes a second of the median worker;  differ : spread of rates (sigma of a lognormal)
    speeds   : spread of how fast they compute;  jitter : of a worker's rounds
    leaving  : share of them that leaves in an hour; as many join
    notice_s : until others know that one has left;  form_s : until all have met again, where all are needed
    """

    workers: int
    up_rate: float
    down_rate: float
    latency_s: float
    rate_sigma: float = 0.0
    speed_sigma: float = 0.0
    jitter_sigma: float = 0.0
    churn_per_h: float = 0.0
    detect_s: float = 0.5
    regroup_s: float = 30.0
    seed: int = 0

    @property
    def losses_per_s(self) -> float:
        """A second, of all."""
        return self.workers * self.churn_per_h / SECONDS_PER_HOUR


@dataclass(frozen=True)
class FleetResult:
    """What was simulated. computing: share of the time;  apart: of ranks from their mean, in steps (inf: they never
    meet);  mixes: rounds until 1 % of a distance between ranks is left;  broken: attempts at a round that a loss ended,
    for one that came to its end;  stale: mean age of what is heard, in rounds"""

    workers: int
    rounds: int
    seconds: float
    images_per_s: float
    sent_bytes_per_h: float
    joiners_bytes_per_h: float
    compute_share: float
    replica_drift: float
    mixing_rounds: float
    failed_attempts: float
    staleness_rounds: float = 0.0

    @property
    def rounds_per_h(self) -> float:
        return SECONDS_PER_HOUR * self.rounds / self.seconds


def simulate_fleet(
    strategy: Any,
    worker_round: WorkerRound,
    config: FleetConfig,
    *,
    rounds: int = 64,
    hours: float = 1.0,
    group_size: int = 1,
    intra_host: Link = DEFAULT_INTRA_HOST_LINK,
) -> FleetResult:
    """Play so many rounds, or so many hours if that is less. groups: sums go round in rings of so many ranks, over
    `within`, then among these (sync)."""
    if strategy.auto_request:
        raise UsageError("strategy=auto is chosen when ranks have met, and not simulated: name those to compare")
    if strategy.coordination == "none":
        return _IndependentSim(worker_round, config, isolated=True).run(rounds, hours)
    if strategy.coordination == "teams":
        return _simulate_teams(strategy, worker_round, config, rounds, hours)
    if strategy.coordination == "gossip":
        return _IndependentSim(worker_round, config, strategy).run(rounds, hours)
    return _simulate_all_reduce(
        _make_all_reduce_model(strategy, worker_round, group_size, intra_host),
        strategy.sync_period,
        worker_round,
        config,
        rounds,
        hours,
    )


class Fleet:
    """Who they are: rates and speeds by worker, and what changes."""

    def __init__(self, config: FleetConfig):
        self.config, n = config, config.workers
        self.rng = philox_generator(config.seed, "crowd")
        self.up_rate, self.down_rate = (
            rate * self._lognormal(config.rate_sigma) for rate in (config.up_rate, config.down_rate)
        )
        self.speed = self._lognormal(config.speed_sigma)
        self.num_workers = n

    def _lognormal(self, sigma: float) -> FloatArray:
        return np.exp(sigma * self.rng.standard_normal(self.config.workers)) if sigma else np.ones(self.config.workers)

    def compute_factors(self) -> FloatArray:
        """On this round's computing."""
        return self.speed * self._lognormal(self.config.jitter_sigma)

    def state_fetch_s(self, nbytes: float) -> float:
        """A joiner's, from one that plays on."""
        return 2 * self.config.latency_s + nbytes / min(self.config.up_rate, self.config.down_rate)


# all together -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LockstepSim:
    """Rounds that all play at once, each as long as the slowest; one that sums and loses somebody is begun again, when
    all have met. round_s: of a step, where the slowest computes so many times as long;  sent: bytes of a worker in a
    round;  every: rounds, of which one sums;  stale: age of what is heard"""

    worker_round: WorkerRound
    config: FleetConfig
    fleet: Fleet
    round_s: Callable[[int, float], float]
    sent_bytes: float
    sync_period: int = 1
    staleness_rounds: float = 0.0

    def run(self, rounds: int, hours: float) -> FleetResult:
        seconds, computing, broken, done = 0.0, 0.0, 0, 0
        forming = self.config.regroup_s + self.fleet.state_fetch_s(self.worker_round.state_bytes)
        while done < rounds and seconds < hours * SECONDS_PER_HOUR:
            factors = self.fleet.compute_factors()
            takes = self.round_s(done, float(factors.max()))
            attempts = (
                [] if done % self.sync_period else self._failed_attempts_s(takes)
            )  # whom nobody waits for is not missed
            broken += len(attempts)
            if len(attempts) >= MAX_ATTEMPTS:
                seconds = hours * SECONDS_PER_HOUR
                break
            seconds, done = seconds + sum(attempts) + len(attempts) * forming + takes, done + 1
            computing += float(factors.mean()) * self.worker_round.compute_s
        joined = self.config.churn_per_h * self.worker_round.state_bytes
        return FleetResult(
            workers=self.config.workers,
            rounds=done,
            seconds=seconds,
            images_per_s=done
            * self.worker_round.images
            * self.worker_round.d.turns_per_round
            * self.config.workers
            / seconds,
            sent_bytes_per_h=SECONDS_PER_HOUR * self.sent_bytes * done / seconds + joined,
            joiners_bytes_per_h=joined,
            compute_share=computing / seconds,
            replica_drift=math.sqrt((self.sync_period - 1) / 2),
            mixing_rounds=float(self.sync_period),
            failed_attempts=broken / max(1, done),
            staleness_rounds=self.staleness_rounds,
        )

    def _failed_attempts_s(self, round_s: float) -> list[float]:
        """How long each lasted that a loss ended, before one that none did."""
        lost, rate = list[float](), self.config.losses_per_s
        if not rate:
            return lost
        if rate * round_s > math.log(MAX_ATTEMPTS):
            return [1 / rate] * int(MAX_ATTEMPTS)
        while (until := self.fleet.rng.exponential(1 / rate)) < round_s:
            lost.append(until)
        return lost


def _simulate_all_reduce(
    all_reduce: AllReduceModel,
    sync_period: int,
    worker_round: WorkerRound,
    config: FleetConfig,
    rounds: int,
    hours: float,
) -> FleetResult:
    people, n = Fleet(config), config.workers
    link = Link(float(min(people.up_rate.min(), people.down_rate.min())), config.latency_s)

    def round_s(step: int, factor: float) -> float:
        own = factor * worker_round.compute_s
        if sync_period == 1:
            return sum(
                half.turns_per_round * all_reduce.turn_s(half, n, link, factor)
                for half in (worker_round.d, worker_round.g)
            )
        if step % sync_period:
            return own
        return own + sum(
            half.turns_per_round * all_reduce.exposed_s(half, n, link) for half in (worker_round.d, worker_round.g)
        )

    sent = worker_round.numel / sync_period * all_reduce.sent_bytes(1e6, n) / 1e6
    return _LockstepSim(worker_round, config, people, round_s, sent, sync_period).run(rounds, hours)


def _make_all_reduce_model(
    strategy: Any, worker_round: WorkerRound, group_size: int = 1, intra_host: Link = DEFAULT_INTRA_HOST_LINK
) -> AllReduceModel:
    handling = worker_round.codec_s_per_number(strategy.wire, passes=2) if strategy.wire.lossy else 0.0
    return AllReduceModel(strategy.wire, handling, group_size, intra_host)


def _simulate_teams(
    strategy: Async, worker_round: WorkerRound, config: FleetConfig, rounds: int, hours: float
) -> FleetResult:
    """Those who play G beside those who play D; each team sums by itself, images and snapshots pass between them."""
    people, summing, n = Fleet(config), _make_all_reduce_model(strategy, worker_round), config.workers
    if strategy.split == "none":
        return _simulate_all_reduce(summing, strategy.sync_period, worker_round, config, rounds, hours)
    d_s, g_s = worker_round.d.turns_per_round * worker_round.d.turn.total_s, worker_round.g.turn.total_s
    g, d = parse_split(strategy.split) if ":" in strategy.split else balance(g_s, d_s, n)
    link = Link(float(min(people.up_rate.min(), people.down_rate.min())), config.latency_s)
    snapshot = strategy.snapshot_wire.nbytes(worker_round.d.numel) / strategy.snapshot_every
    posted = 2 * config.latency_s + snapshot / link.bandwidth

    def round_s(step: int, factor: float) -> float:
        summed = step % strategy.sync_period == 0
        of_g = summing.turn_s(worker_round.g, g if summed else 1, link, factor * n / g)
        of_d = worker_round.d.turns_per_round * summing.turn_s(worker_round.d, d if summed else 1, link, factor * n / d)
        return max(of_g, of_d) + (posted if strategy.max_lead_rounds == 1 else 0.0)

    sent = (
        summing.sent_bytes(1e6, n)
        / 1e6
        * (g * worker_round.g.numel + d * worker_round.d.numel * worker_round.d.turns_per_round)
        / n
        / strategy.sync_period
    )
    stale = float(strategy.max_lead_rounds - 1) + (strategy.snapshot_every - 1) / 2
    sent += snapshot * g / n
    return _LockstepSim(worker_round, config, people, round_s, sent, strategy.sync_period, stale).run(rounds, hours)


# each with a few ----------------------------------------------------------------------------------------


@dataclass
class _IndependentSim:
    """Every worker has a clock of its own. What it waits for: nothing (alone), or what its peers sent when they began
    this round; with staleness on a ring, swaps that were begun so many rounds ago."""

    worker_round: WorkerRound
    config: FleetConfig
    strategy: Any = None
    isolated: bool = False
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        self.fleet, n = Fleet(self.config), self.config.workers
        self.round_start_s, self.compute_s = np.zeros(n), np.zeros(n)
        self.traces = np.zeros((NUM_TRACES, n))
        self.sent_bytes, self.num_lost, self.swap_ages = 0.0, 0, list[float]()
        self.lost_mask = np.zeros(n, bool)  # who has left in the last round: nobody hears from it
        self.ring_swaps = _RingSwaps(n) if self.strategy is not None and self.strategy.staleness else None

    def run(self, rounds: int, hours: float) -> FleetResult:
        done, marks, sums = 0, [0.0, 0.0, 0.0], list[float]()
        for step in range(WARM_UP_ROUNDS + rounds):
            if step == WARM_UP_ROUNDS:
                marks = [self._mean_time_s(), float(self.compute_s.mean()), self.sent_bytes]
            if step > WARM_UP_ROUNDS and self._mean_time_s() - marks[0] > hours * SECONDS_PER_HOUR:
                break
            self._play_round(step)
            done += step >= WARM_UP_ROUNDS
            sums.append(self._replica_drift())
        seconds, n = self._mean_time_s() - marks[0], self.config.workers
        joined = self.config.churn_per_h * self.worker_round.state_bytes
        return FleetResult(
            workers=n,
            rounds=done,
            seconds=seconds,
            images_per_s=done * self.worker_round.images * self.worker_round.d.turns_per_round * n / seconds,
            sent_bytes_per_h=SECONDS_PER_HOUR * (self.sent_bytes - marks[2]) / n / seconds + joined,
            joiners_bytes_per_h=joined,
            compute_share=(float(self.compute_s.mean()) - marks[1]) / seconds,
            replica_drift=math.inf if self.isolated else float(np.mean(sums[-max(1, len(sums) // 4) :])),
            mixing_rounds=math.inf if self.isolated else rounds_to_contract(0.01, self.strategy, n),
            failed_attempts=0.0,
            staleness_rounds=float(np.mean(self.swap_ages)) if self.swap_ages else 0.0,
        )

    def _mean_time_s(self) -> float:
        return float(self.round_start_s.mean())

    def _replica_drift(self) -> float:
        centred = self.traces - self.traces.mean(1, keepdims=True)
        return float(np.sqrt((centred**2).mean()))

    def _play_round(self, step: int) -> None:
        computes = self.fleet.compute_factors() * self.worker_round.compute_s
        ends = self.round_start_s + computes
        self.compute_s += computes
        if self.ring_swaps is not None:
            ends = self._swap_step(step, ends)
        elif not self.isolated and (step + 1) % self.strategy.sync_period == 0:
            first = step // self.strategy.sync_period * self.strategy.rounds
            for mix in range(first, first + self.strategy.rounds):
                ends = self._mix_step(mix, ends)
        self.traces += self.fleet.rng.standard_normal(self.traces.shape)
        self._apply_churn(ends - self.round_start_s)
        self.round_start_s = np.where(
            self.lost_mask, ends + self.fleet.state_fetch_s(self.worker_round.state_bytes), ends
        )

    def _apply_churn(self, round_s: FloatArray) -> None:
        """Some leave; whoever comes in their place has what one of the others holds."""
        chance = -np.expm1(-self.config.churn_per_h * round_s / SECONDS_PER_HOUR)
        self.lost_mask = self.fleet.rng.random(self.config.workers) < chance
        there = np.flatnonzero(self.lost_mask)
        self.num_lost += len(there)
        self.traces[:, there] = self.traces[:, self.fleet.rng.integers(0, self.config.workers, len(there))]

    def _peers(self, step: int) -> tuple[list[NDArray[np.int64]], float]:
        """Whom every worker hears, one array for each message; and the weight of each."""
        n, name = self.config.workers, self.strategy.topology.name
        places = np.arange(n)
        if name == "one-peer":
            return [(places - (1 << step % max(1, (n - 1).bit_length()))) % n], 1 / 2
        if name == "ring":
            return [(places - 1) % n, (places + 1) % n], 1 / 3
        order = philox_generator(self.config.seed, "graph", position=step).permutation(n)
        where = np.empty(n, np.int64)
        where[order] = places
        if name == "random-ring":
            return [order[(where - 1) % n], order[(where + 1) % n]], 1 / 3
        if name == "matching":
            other = np.where(where % 2 == 0, where + 1, where - 1)
            return [order[np.where(other < n, other, where)]], 1 / 2
        raise UsageError(f"strategy.topology={name} is not simulated: one-peer, ring, random-ring and matching are")

    def _mix_step(self, step: int, ends: FloatArray) -> FloatArray:
        """A message leaves when both have begun the round and the question has travelled; ports are shared."""
        peers, weight = self._peers(step)
        nbytes, wire = self._message_bytes(), self.strategy.wire
        handled = self.worker_round.numel * self.worker_round.codec_s_per_number(wire, passes=5 if wire.lossy else 3)
        heard = self.traces * (1 - weight * len(peers))
        for peer in peers:
            rate = np.minimum(self.fleet.up_rate[peer], self.fleet.down_rate) / len(peers)
            asked = np.maximum(self.round_start_s[peer], self.round_start_s + self.config.latency_s)
            arrives = asked + self.config.latency_s + nbytes / rate
            missing = self.lost_mask[peer]
            arrives = np.where(missing, self.round_start_s + self.config.detect_s, arrives)
            ends = np.where(peer == np.arange(len(peer)), ends, np.maximum(ends, arrives))
            heard += weight * np.where(missing, self.traces, self.traces[:, peer])
        self.traces = heard
        ends = ends + handled
        self.sent_bytes += nbytes * len(peers) * self.config.workers
        return ends

    def _message_bytes(self) -> float:
        """Bytes of a message: parameters of both players."""
        return self.strategy.wire.nbytes(self.worker_round.numel)

    def _swap_step(self, step: int, ends: FloatArray) -> FloatArray:
        """On a ring: edge i joins i and i + 1. Both ends post, and mix when both have the other's, or must."""
        if self.strategy.topology.name != "ring":
            raise UsageError(f"strategy.staleness is simulated on a ring, not on {self.strategy.topology.name}")
        assert self.ring_swaps is not None
        n, swap, nbytes = self.config.workers, self.ring_swaps, self._message_bytes()
        after = np.roll(np.arange(n), -1)
        broken = self.lost_mask | self.lost_mask[after]
        new = swap.start_round < 0
        rate = np.minimum(self.fleet.up_rate, self.fleet.up_rate[after]) / 2  # both links of a worker share its port
        asked = np.maximum(self.round_start_s, self.round_start_s[after]) + self.config.latency_s
        swap.end_s[new] = (asked + self.config.latency_s + nbytes / rate)[new]
        swap.start_round[new] = step
        swap.difference[:, new] = (self.traces[:, after] - self.traces)[:, new]
        self.sent_bytes += 2 * nbytes * float(new.sum())
        swap.end_s[broken] = (self.round_start_s + self.config.detect_s)[broken]
        forced = step - swap.start_round >= self.strategy.staleness
        waits = np.where(forced, swap.end_s, 0.0)
        ends = np.maximum(ends, np.maximum(waits, np.roll(waits, 1)))
        here = swap.end_s <= np.minimum(ends, ends[after])
        if here.any():
            self.swap_ages.append(float((step - swap.start_round)[here].mean()))
        moved = np.where(here & ~broken, swap.difference / 3, 0.0)
        self.traces += moved - np.roll(moved, 1, axis=1)
        swap.start_round[here] = -1
        return ends


class _RingSwaps:
    """One swap on each edge of a ring: the round in which it was begun (-1: none is), when it is over, and how far both
    ends were apart then."""

    def __init__(self, n: int):
        self.start_round, self.end_s = np.full(n, -1), np.zeros(n)
        self.difference = np.zeros((NUM_TRACES, n))
