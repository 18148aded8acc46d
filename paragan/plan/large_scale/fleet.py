"""Simulate rounds of up to 100,000 workers with arrays, one element per worker: `paragan plan --large-scale`.

config = FleetConfig(100_000, up_rate=2.5e6, down_rate=12.5e6, latency_s=0.04, churn_per_h=0.01)
result = simulate_fleet(parse_strategy("gossip"), worker_round, config)
result.images_per_s, result.sent_bytes_per_h, result.replica_drift

A worker's round ends when it has computed and everything that it waits for has arrived. Workers differ, vary from round
to round, and leave; each is replaced by one that fetches the state of another worker. All of it follows from the seed.

The parameters of a worker are modelled by NUM_TRACES numbers. Each makes a random step of size 1 per round, and they
are mixed as parameters are. So `replica_drift`, their distance from the mean over workers, is in units of a step.
docs/planning.md lists what is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paragan.comm.topology import BUILTIN_TOPOLOGIES, contraction_by_spectrum
from paragan.core.errors import UsageError
from paragan.core.philox import philox_generator
from paragan.plan.large_scale.round_time import AllReduceModel, WorkerRound
from paragan.plan.links import DEFAULT_INTRA_HOST_LINK, Link
from paragan.strategies.async_paragan import Async
from paragan.strategies.gd_teams import balance, parse_split

FloatArray = NDArray[np.float64]
SECONDS_PER_HOUR = 3600.0
WARM_UP_ROUNDS = 8
NUM_TRACES = 8  # numbers per worker that stand for its parameters
MAX_ATTEMPTS = 1e4  # after as many failed attempts, a round is taken never to end


@dataclass(frozen=True)
class FleetConfig:
    """The workers of a fleet and their links. A sigma is that of a lognormal distribution.

    up_rate, down_rate : of the median worker, in bytes per second
    rate_sigma         : spread of the rates over workers
    speed_sigma        : spread of the computing speeds over workers
    jitter_sigma       : spread of a worker's computing time over rounds
    churn_per_h        : fraction of the workers that leaves in an hour; as many join
    detect_s           : time until the others know that a worker has left
    regroup_s          : time until a new group is formed, for strategies that need all workers
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
        """Workers that leave per second."""
        return self.workers * self.churn_per_h / SECONDS_PER_HOUR


@dataclass(frozen=True)
class FleetResult:
    """Result of a simulation.

    joiners_bytes_per_h : sent per worker to those that join
    compute_share       : fraction of the time that workers compute
    replica_drift       : distance of workers from their mean, in steps; infinity if they never communicate
    mixing_rounds       : rounds until 1 % of a distance between workers is left
    failed_attempts     : attempts at a round that the loss of a worker ended, per completed round
    staleness_rounds    : mean age of the parameters that workers receive
    """

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
        """Completed rounds per hour."""
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
    """Simulate a strategy.

    Args:
        strategy: to simulate.
        worker_round: what a worker computes and sends in a round.
        config: of the fleet.
        rounds: to simulate, at most.
        hours: of simulated time, at most.
        group_size: with more than one, all-reduces are hierarchical: first in groups of as many workers, over
            `intra_host` links, then between the groups.
        intra_host: the link between the workers of a group.

    Raises:
        UsageError: the strategy or its topology cannot be simulated.
    """
    if strategy.auto_request:
        raise UsageError("strategy=auto: it cannot be simulated. Name the strategies to compare")
    if strategy.num_fragments > 1 or strategy.rounds_in_flight:
        raise UsageError(
            f"strategy={strategy.name}: fragments and a delay cannot be simulated for a fleet. Use fragments=1 and "
            "delay=0"
        )
    if strategy.coordination == "none":
        return _IndependentSim(worker_round, config, isolated=True).run(rounds, hours)
    if strategy.coordination == "teams":
        return _simulate_teams(strategy, worker_round, config, rounds, hours)
    if strategy.coordination == "gossip":
        _check_topology(strategy.topology)
        return _IndependentSim(worker_round, config, strategy).run(rounds, hours)
    return _simulate_all_reduce(
        _make_all_reduce_model(strategy, worker_round, group_size, intra_host),
        strategy.sync_period,
        worker_round,
        config,
        rounds,
        hours,
    )


def _check_topology(topology: Any) -> None:
    """Raise UsageError if the senders of a topology are only known from its matrix."""
    if not hasattr(topology, "senders"):
        names = ", ".join(t.name for t in BUILTIN_TOPOLOGIES if hasattr(t, "senders"))
        raise UsageError(f"strategy.topology={topology.name}: it cannot be simulated. Use {names}")


def rounds_to_contract(remaining: float, strategy: Any, ranks: int) -> float:
    """Return the rounds of gossip until the fraction `remaining` of a distance between ranks is left."""
    factor = contraction_by_spectrum(strategy.topology, ranks) ** strategy.rounds
    if factor == 0:  # the exact mean, after all graphs of a period
        return math.ceil(max(1, strategy.topology.period(ranks)) / strategy.rounds) * strategy.sync_period
    if factor >= 1:
        return math.inf
    return max(1.0, math.log(remaining) / math.log(factor)) * strategy.sync_period


class Fleet:
    """Rates and speeds of all workers, drawn from the seed."""

    def __init__(self, config: FleetConfig):
        self.config = config
        self.rng = philox_generator(config.seed, "crowd")
        self.up_rate = config.up_rate * self._lognormal(config.rate_sigma)
        self.down_rate = config.down_rate * self._lognormal(config.rate_sigma)
        self.speed = self._lognormal(config.speed_sigma)

    def _lognormal(self, sigma: float) -> FloatArray:
        if not sigma:
            return np.ones(self.config.workers)
        return np.exp(sigma * self.rng.standard_normal(self.config.workers))

    @property
    def slowest_link(self) -> Link:
        """A link with the lowest rate of all workers."""
        return Link(float(min(self.up_rate.min(), self.down_rate.min())), self.config.latency_s)

    def compute_factors(self) -> FloatArray:
        """Draw each worker's factor on its computing time in a round."""
        return self.speed * self._lognormal(self.config.jitter_sigma)

    def state_fetch_s(self, nbytes: float) -> float:
        """Return the seconds in which a worker that joins fetches a state from another one."""
        return 2 * self.config.latency_s + nbytes / min(self.config.up_rate, self.config.down_rate)


# All workers in lockstep --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LockstepSim:
    """Rounds that all workers play together, each as long as that of the slowest.

    If a worker is lost in a round with an exchange, the others form a new group and play the round again.

    round_s          : (step, factor of the slowest worker on its computing time) -> seconds of a round
    sent_bytes       : by a worker in a round
    sync_period      : one of as many rounds has an exchange
    staleness_rounds : age of the opponent that a player uses
    """

    worker_round: WorkerRound
    config: FleetConfig
    fleet: Fleet
    round_s: Callable[[int, float], float]
    sent_bytes: float
    sync_period: int = 1
    staleness_rounds: float = 0.0

    def run(self, rounds: int, hours: float) -> FleetResult:
        seconds = 0.0
        compute_s = 0.0
        num_failed = 0
        num_rounds = 0
        rejoin_s = self.config.regroup_s + self.fleet.state_fetch_s(self.worker_round.state_bytes)
        while num_rounds < rounds and seconds < hours * SECONDS_PER_HOUR:
            factors = self.fleet.compute_factors()
            round_s = self.round_s(num_rounds, float(factors.max()))
            failed_s: list[float] = []
            if num_rounds % self.sync_period == 0:  # without an exchange, nobody waits for a lost worker
                failed_s = self._draw_failed_attempts(round_s)
            num_failed += len(failed_s)
            if len(failed_s) >= MAX_ATTEMPTS:
                seconds = hours * SECONDS_PER_HOUR
                break
            seconds = seconds + sum(failed_s) + len(failed_s) * rejoin_s + round_s
            num_rounds += 1
            compute_s += float(factors.mean()) * self.worker_round.compute_s
        joiners_bytes = self.config.churn_per_h * self.worker_round.state_bytes
        images = num_rounds * self.worker_round.images * self.worker_round.d.turns_per_round * self.config.workers
        return FleetResult(
            workers=self.config.workers,
            rounds=num_rounds,
            seconds=seconds,
            images_per_s=images / seconds,
            sent_bytes_per_h=SECONDS_PER_HOUR * self.sent_bytes * num_rounds / seconds + joiners_bytes,
            joiners_bytes_per_h=joiners_bytes,
            compute_share=compute_s / seconds,
            replica_drift=math.sqrt((self.sync_period - 1) / 2),
            mixing_rounds=float(self.sync_period),
            failed_attempts=num_failed / max(1, num_rounds),
            staleness_rounds=self.staleness_rounds,
        )

    def _draw_failed_attempts(self, round_s: float) -> list[float]:
        """Draw the seconds until a loss, for each failed attempt before one without a loss."""
        failed_s = list[float]()
        losses_per_s = self.config.losses_per_s
        if not losses_per_s:
            return failed_s
        if losses_per_s * round_s > math.log(MAX_ATTEMPTS):
            return [1 / losses_per_s] * int(MAX_ATTEMPTS)
        while (loss_s := self.fleet.rng.exponential(1 / losses_per_s)) < round_s:
            failed_s.append(loss_s)
        return failed_s


def _simulate_all_reduce(
    all_reduce: AllReduceModel,
    sync_period: int,
    worker_round: WorkerRound,
    config: FleetConfig,
    rounds: int,
    hours: float,
) -> FleetResult:
    """Simulate a strategy whose workers sum gradients in every turn, or parameters every `sync_period` rounds."""
    fleet = Fleet(config)
    workers = config.workers
    link = fleet.slowest_link
    turns = (worker_round.d, worker_round.g)

    def round_s(step: int, factor: float) -> float:
        if sync_period == 1:
            return sum(turn.turns_per_round * all_reduce.turn_s(turn, workers, link, factor) for turn in turns)
        compute_s = factor * worker_round.compute_s
        if step % sync_period:
            return compute_s
        return compute_s + sum(turn.turns_per_round * all_reduce.exposed_s(turn, workers, link) for turn in turns)

    sent_bytes = worker_round.numel / sync_period * all_reduce.sent_bytes(1e6, workers) / 1e6
    return _LockstepSim(worker_round, config, fleet, round_s, sent_bytes, sync_period).run(rounds, hours)


def _make_all_reduce_model(
    strategy: Any, worker_round: WorkerRound, group_size: int = 1, intra_host: Link = DEFAULT_INTRA_HOST_LINK
) -> AllReduceModel:
    codec_s = worker_round.codec_s_per_number(strategy.wire, passes=2) if strategy.wire.lossy else 0.0
    return AllReduceModel(strategy.wire, codec_s, group_size, intra_host)


def _simulate_teams(
    strategy: Async, worker_round: WorkerRound, config: FleetConfig, rounds: int, hours: float
) -> FleetResult:
    """Simulate the teams of G and D. Each team sums by itself; images and snapshots pass between them."""
    all_reduce = _make_all_reduce_model(strategy, worker_round)
    if strategy.split == "none":
        return _simulate_all_reduce(all_reduce, strategy.sync_period, worker_round, config, rounds, hours)
    fleet = Fleet(config)
    workers = config.workers
    if ":" in strategy.split:
        num_g, num_d = parse_split(strategy.split)
    else:
        d_s = worker_round.d.turns_per_round * worker_round.d.turn.total_s
        num_g, num_d = balance(worker_round.g.turn.total_s, d_s, workers)
    link = fleet.slowest_link
    snapshot_bytes = strategy.snapshot_wire.nbytes(worker_round.d.numel) / strategy.snapshot_every
    snapshot_s = 2 * config.latency_s + snapshot_bytes / link.bandwidth

    def round_s(step: int, factor: float) -> float:
        has_exchange = step % strategy.sync_period == 0
        g_ranks = num_g if has_exchange else 1
        d_ranks = num_d if has_exchange else 1
        g_s = all_reduce.turn_s(worker_round.g, g_ranks, link, factor * workers / num_g)
        d_turn_s = all_reduce.turn_s(worker_round.d, d_ranks, link, factor * workers / num_d)
        teams_s = max(g_s, worker_round.d.turns_per_round * d_turn_s)
        return teams_s + (snapshot_s if strategy.max_lead_rounds == 1 else 0.0)

    gradients_numel = num_g * worker_round.g.numel + num_d * worker_round.d.numel * worker_round.d.turns_per_round
    sent_bytes = all_reduce.sent_bytes(1e6, workers) / 1e6 * gradients_numel / workers / strategy.sync_period
    sent_bytes += snapshot_bytes * num_g / workers
    staleness = float(strategy.max_lead_rounds - 1) + (strategy.snapshot_every - 1) / 2
    sim = _LockstepSim(worker_round, config, fleet, round_s, sent_bytes, strategy.sync_period, staleness)
    return sim.run(rounds, hours)


# Each worker with a few others --------------------------------------------------------------------------


@dataclass
class _IndependentSim:
    """Workers with clocks of their own.

    An isolated worker waits for nothing. Under gossip it waits for what its peers sent when they began the round; with
    staleness on a ring, for swaps that were started that many rounds ago.
    """

    worker_round: WorkerRound
    config: FleetConfig
    strategy: Any = None
    isolated: bool = False
    fleet: Fleet = field(init=False)

    def __post_init__(self) -> None:
        workers = self.config.workers
        self.fleet = Fleet(self.config)
        self.round_start_s = np.zeros(workers)
        self.compute_s = np.zeros(workers)
        self.traces = np.zeros((NUM_TRACES, workers))
        self.sent_bytes = 0.0
        self.swap_ages = list[float]()
        self.lost_mask = np.zeros(workers, bool)  # workers that left in the last round and cannot send
        self.ring_swaps = _RingSwaps(workers) if self.strategy is not None and self.strategy.staleness else None

    def run(self, rounds: int, hours: float) -> FleetResult:
        workers = self.config.workers
        num_rounds = 0
        start_s = start_compute_s = start_bytes = 0.0
        drifts = list[float]()
        for step in range(WARM_UP_ROUNDS + rounds):
            if step == WARM_UP_ROUNDS:
                start_s = self._mean_time_s()
                start_compute_s = float(self.compute_s.mean())
                start_bytes = self.sent_bytes
            if step > WARM_UP_ROUNDS and self._mean_time_s() - start_s > hours * SECONDS_PER_HOUR:
                break
            self._play_round(step)
            num_rounds += step >= WARM_UP_ROUNDS
            drifts.append(self._replica_drift())
        seconds = self._mean_time_s() - start_s
        joiners_bytes = self.config.churn_per_h * self.worker_round.state_bytes
        images = num_rounds * self.worker_round.images * self.worker_round.d.turns_per_round * workers
        sent_bytes = self.sent_bytes - start_bytes
        return FleetResult(
            workers=workers,
            rounds=num_rounds,
            seconds=seconds,
            images_per_s=images / seconds,
            sent_bytes_per_h=SECONDS_PER_HOUR * sent_bytes / workers / seconds + joiners_bytes,
            joiners_bytes_per_h=joiners_bytes,
            compute_share=(float(self.compute_s.mean()) - start_compute_s) / seconds,
            replica_drift=math.inf if self.isolated else float(np.mean(drifts[-max(1, len(drifts) // 4) :])),
            mixing_rounds=math.inf if self.isolated else rounds_to_contract(0.01, self.strategy, workers),
            failed_attempts=0.0,
            staleness_rounds=float(np.mean(self.swap_ages)) if self.swap_ages else 0.0,
        )

    def _mean_time_s(self) -> float:
        return float(self.round_start_s.mean())

    def _replica_drift(self) -> float:
        centred = self.traces - self.traces.mean(1, keepdims=True)
        return float(np.sqrt((centred**2).mean()))

    def _play_round(self, step: int) -> None:
        compute_s = self.fleet.compute_factors() * self.worker_round.compute_s
        end_s = self.round_start_s + compute_s
        self.compute_s += compute_s
        if self.ring_swaps is not None:
            end_s = self._swap_step(step, end_s)
        elif not self.isolated and (step + 1) % self.strategy.sync_period == 0:
            first = step // self.strategy.sync_period * self.strategy.rounds
            for mix in range(first, first + self.strategy.rounds):
                end_s = self._mix_step(mix, end_s)
        self.traces += self.fleet.rng.standard_normal(self.traces.shape)
        self._apply_churn(end_s - self.round_start_s)
        fetch_s = self.fleet.state_fetch_s(self.worker_round.state_bytes)
        self.round_start_s = np.where(self.lost_mask, end_s + fetch_s, end_s)

    def _apply_churn(self, round_s: FloatArray) -> None:
        """Replace some workers, each by one that has the parameters of a random worker."""
        probability = -np.expm1(-self.config.churn_per_h * round_s / SECONDS_PER_HOUR)
        self.lost_mask = self.fleet.rng.random(self.config.workers) < probability
        lost = np.flatnonzero(self.lost_mask)
        self.traces[:, lost] = self.traces[:, self.fleet.rng.integers(0, self.config.workers, len(lost))]

    def _mix_step(self, step: int, end_s: FloatArray) -> FloatArray:
        """Mix with the peers, and return when each worker is done.

        A message is sent when both workers have begun the round and the request has arrived. Messages of a worker share
        its port.
        """
        peers = self.strategy.topology.senders(self.config.workers, step)
        weight = 1 / (1 + len(peers))
        wire = self.strategy.wire
        nbytes = self._message_bytes()
        codec_s = self.worker_round.numel * self.worker_round.codec_s_per_number(wire, passes=5 if wire.lossy else 3)
        mixed = self.traces * (1 - weight * len(peers))
        for peer in peers:
            rate = np.minimum(self.fleet.up_rate[peer], self.fleet.down_rate) / len(peers)
            send_s = np.maximum(self.round_start_s[peer], self.round_start_s + self.config.latency_s)
            arrival_s = send_s + self.config.latency_s + nbytes / rate
            is_lost = self.lost_mask[peer]
            arrival_s = np.where(is_lost, self.round_start_s + self.config.detect_s, arrival_s)
            end_s = np.where(peer == np.arange(len(peer)), end_s, np.maximum(end_s, arrival_s))
            mixed += weight * np.where(is_lost, self.traces, self.traces[:, peer])
        self.traces = mixed
        self.sent_bytes += nbytes * len(peers) * self.config.workers
        return end_s + codec_s

    def _message_bytes(self) -> float:
        """Return the bytes of a message: the parameters of both players."""
        return self.strategy.wire.nbytes(self.worker_round.numel)

    def _swap_step(self, step: int, end_s: FloatArray) -> FloatArray:
        """Swap parameters asynchronously on a ring, and return when each worker is done.

        Edge i joins workers i and i + 1. Both mix when the swap is done; they wait for it if it is too old.
        """
        if self.strategy.topology.name != "ring":
            raise UsageError(
                f"strategy.topology={self.strategy.topology.name}: strategy.staleness is only simulated on a ring. "
                "Use strategy.topology=ring"
            )
        assert self.ring_swaps is not None
        swaps = self.ring_swaps
        nbytes = self._message_bytes()
        after = np.roll(np.arange(self.config.workers), -1)
        is_broken = self.lost_mask | self.lost_mask[after]
        is_new = swaps.start_round < 0
        rate = np.minimum(self.fleet.up_rate, self.fleet.up_rate[after]) / 2  # both edges of a worker share its port
        send_s = np.maximum(self.round_start_s, self.round_start_s[after]) + self.config.latency_s
        swaps.end_s[is_new] = (send_s + self.config.latency_s + nbytes / rate)[is_new]
        swaps.start_round[is_new] = step
        swaps.difference[:, is_new] = (self.traces[:, after] - self.traces)[:, is_new]
        self.sent_bytes += 2 * nbytes * float(is_new.sum())
        swaps.end_s[is_broken] = (self.round_start_s + self.config.detect_s)[is_broken]
        is_due = step - swaps.start_round >= self.strategy.staleness
        due_s = np.where(is_due, swaps.end_s, 0.0)
        end_s = np.maximum(end_s, np.maximum(due_s, np.roll(due_s, 1)))
        is_done = swaps.end_s <= np.minimum(end_s, end_s[after])
        if is_done.any():
            self.swap_ages.append(float((step - swaps.start_round)[is_done].mean()))
        change = np.where(is_done & ~is_broken, swaps.difference / 3, 0.0)
        self.traces += change - np.roll(change, 1, axis=1)
        swaps.start_round[is_done] = -1
        return end_s


class _RingSwaps:
    """One swap on each edge of a ring: its first round (-1: there is none), its end, and the difference to mix."""

    def __init__(self, workers: int):
        self.start_round = np.full(workers, -1)
        self.end_s = np.zeros(workers)
        self.difference = np.zeros((NUM_TRACES, workers))
