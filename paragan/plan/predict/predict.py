"""Predict the time of a round with any strategy, from one worker's profile, the links, and the strategy's own roles.

    p = predict(run, read_profile(Path("profile.yaml")), parse_links("8 hosts, 200 Mbit/s, 10 ms"))
    p.step_s, p.images_per_s, p.breakdown_s

Some rounds are played in simulated time (simulation.py): by the strategy's own roles, exchanges and mailboxes, on
networks that take the time of the profile, over links that take the time of plan/predict/network.py. docs/prediction.md
lists the assumptions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paragan.core.errors import UsageError
from paragan.plan.links import Link, Links
from paragan.plan.predict.event_loop import Deadlock
from paragan.plan.predict.network import MessageMismatch
from paragan.plan.predict.simulated_game import PlannedRun
from paragan.plan.predict.simulation import RankTimeline, Simulation, Slowdown, no_jitter, with_balanced_split
from paragan.plan.profile.profile import Profile

WARM_UP_ROUNDS = 2
MIN_TIMED_ROUNDS = 4  # rounded up to whole periods
ROUNDS_PER_LAG = 2  # timed rounds per round that links may lag
MAX_PERIOD_ROUNDS = 32  # of a longer period, only this many rounds around its exchange are simulated
IDEAL_BYTES_PER_S = 1e13  # a rate that costs nothing
ZERO_LATENCY_S = 0.0


@dataclass(frozen=True)
class Prediction:
    """One strategy on some ranks.

    step_s           : seconds of a round of the slowest rank, mean over rounds
    images_per_s     : real images of all ranks
    compute_s        : seconds of computing in a round, of the rank that computes longest
    efficiency       : images_per_s divided by that of as many independent workers with this local batch
    sent_bytes       : in a round, of the rank that sends most, mean over rounds
    messages         : the same for messages
    memory_bytes     : largest memory of a rank during a round
    staleness_rounds : mean age of the opponent that a player uses (with asynchronous gossip: of the parameters that it
                       receives from neighbors); 0 in lockstep
    explain          : computes `breakdown_s`
    """

    step_s: float
    images_per_s: float
    compute_s: float
    efficiency: float
    sent_bytes: int
    messages: int
    memory_bytes: int
    staleness_rounds: float
    explain: Callable[[], Mapping[str, float]] = dataclasses.field(default=dict, compare=False, repr=False)

    @functools.cached_property
    def breakdown_s(self) -> Mapping[str, float]:
        """step_s by cause. compute, codec: of the slowest rank; latency: what links without latency would save;
        bandwidth: what unlimited rates would save in addition; waiting: the rest.

        It is computed when it is first asked for: the rounds are played twice more.
        """
        return self.explain()


def predict(
    run: PlannedRun,
    profile: Profile,
    links: Links,
    ranks: int | None = None,
    *,
    slowdown: Slowdown = no_jitter,
    min_rounds: int = 0,
) -> Prediction:
    """Predict a round of a run.

    Args:
        run: resolved; used are strategy, batch, lanes, d_steps, g_batch and the shape of the data.
        profile: of one worker.
        links: between hosts.
        ranks: default: all ranks of the links.
        slowdown: (rank, round) -> factor on the computing time, to model stragglers and jitter.
        min_rounds: simulate at least this many rounds; needed if `slowdown` varies.

    Raises:
        UsageError: a round never ends, or ranks do not agree on what they send; it says which rank does what.
    """
    ranks = links.ranks if ranks is None else ranks
    if run.strategy.per_label:
        return _predict_per_label(run, profile, links, ranks)
    run = with_balanced_split(run, profile, ranks)
    window = RoundWindow.of(run.strategy, ranks, min_rounds)
    simulation = Simulation(run, profile, ranks, window.steps, window.warm_up_rounds, slowdown)
    try:
        num_played = _count_different_ranks(simulation, links)
        timelines = simulation.play(links, num_played)
    except Deadlock as error:
        raise UsageError(
            f"strategy={run.strategy.name}: a round on {ranks} ranks never ends: {error}. "
            "Let every rank send what others wait for"
        ) from error
    except MessageMismatch as error:
        raise UsageError(
            f"strategy={run.strategy.name}: a round on {ranks} ranks fails: {error}. "
            "Let ranks call the same collectives, and send what others receive"
        ) from error
    step_s = window.mean_round_s(timelines)
    return Prediction(
        step_s=step_s,
        images_per_s=run.round_images / step_s,
        compute_s=max(timeline.compute_s for timeline in timelines) / window.num_timed,
        efficiency=profile.round_s(run.batch / ranks) / step_s,
        sent_bytes=window.mean_count([timeline.sent_bytes for timeline in timelines]),
        messages=window.mean_count([timeline.messages for timeline in timelines]),
        memory_bytes=_memory_bytes(run, profile, ranks, timelines),
        staleness_rounds=_mean_staleness(run.strategy, timelines),
        explain=lambda: window.breakdown_s(
            timelines,
            without_latency=simulation.play(_without_latency(links), num_played),
            on_ideal_links=simulation.play(_ideal_links(links), num_played),
        ),
    )


@dataclass(frozen=True)
class RoundWindow:
    """The rounds that are simulated, and means over them.

    period           : rounds after which the strategy repeats
    min_rounds       : timed rounds, at least
    lag_rounds       : rounds that asynchronous links may lag; after as many rounds the times are stationary
    sends_in         : the rounds of a period in which something is sent
    rounds_in_flight : after which it is waited for
    """

    period: int
    min_rounds: int = 0
    lag_rounds: int = 0
    sends_in: tuple[int, ...] = (0,)
    rounds_in_flight: int = 0

    @staticmethod
    def of(strategy: Any, ranks: int, min_rounds: int = 0) -> RoundWindow:
        """Return the rounds that have to be simulated of a strategy."""
        return RoundWindow(
            _repeat_period(strategy, ranks),
            min_rounds,
            _max_swap_rounds(strategy),
            strategy.sends_in,
            strategy.rounds_in_flight,
        )

    @property
    def covers_period(self) -> bool:
        """Whether whole periods are simulated."""
        return self.period <= max(MAX_PERIOD_ROUNDS, self.sends_in[-1] + self.rounds_in_flight + 1)

    @property
    def warm_up_rounds(self) -> int:
        """Rounds at the beginning that are not timed."""
        return WARM_UP_ROUNDS + (self.lag_rounds + self.rounds_in_flight if self.covers_period else 0)

    @property
    def steps(self) -> Sequence[int]:
        """All simulated rounds."""
        if not self.covers_period:
            around = MAX_PERIOD_ROUNDS // 2
            if self.sends_in == (0,) and self.rounds_in_flight + 1 < around:
                # the exchange is at the end of a period, or at its beginning
                return range(self.period - around, self.period + around)
            busy = {send + i for send in self.sends_in for i in range(-1, self.rounds_in_flight + 2)}
            first = self.period - 1
            return [*range(first - WARM_UP_ROUNDS, first), *(self.period + i for i in sorted(busy))]
        rounds = max(MIN_TIMED_ROUNDS, self.min_rounds, ROUNDS_PER_LAG * self.lag_rounds)
        return range(self.warm_up_rounds + self.period * -(-rounds // self.period))

    @property
    def num_timed(self) -> int:
        """Rounds that are timed."""
        return len(self.steps) - self.warm_up_rounds

    def mean_count(self, counts: Sequence[int]) -> int:
        """Return the count per round of the rank whose count is highest."""
        return round(max(counts) / (self.num_timed if self.covers_period else self.period))

    def mean_round_s(self, timelines: Sequence[RankTimeline]) -> float:
        """Return the seconds of a round of the slowest rank."""
        total = max(timeline.end_s - timeline.start_s for timeline in timelines)
        if self.covers_period:
            return total / self.num_timed
        local_round_s = max(statistics.median(timeline.rounds_s) for timeline in timelines)
        return (total + local_round_s * (self.period - self.num_timed)) / self.period

    def breakdown_s(
        self,
        timelines: Sequence[RankTimeline],
        *,
        without_latency: Sequence[RankTimeline],
        on_ideal_links: Sequence[RankTimeline],
    ) -> dict[str, float]:
        """Return the seconds of a round by cause (`Prediction.breakdown_s`).

        Args:
            timelines: on the links.
            without_latency: on the same links without latency.
            on_ideal_links: without latency and with unlimited rates.
        """
        slowest = max(timelines, key=lambda timeline: timeline.end_s)
        step_s = self.mean_round_s(timelines)
        seconds = {
            "compute": slowest.compute_s / self.num_timed,
            "codec": slowest.codec_s / self.num_timed,
            "latency": max(0.0, step_s - self.mean_round_s(without_latency)),
            "bandwidth": max(0.0, self.mean_round_s(without_latency) - self.mean_round_s(on_ideal_links)),
        }
        return seconds | {"waiting": max(0.0, step_s - sum(seconds.values()))}


def _repeat_period(strategy: Any, ranks: int) -> int:
    """Return after how many rounds everything that the strategy sends repeats."""
    periods = [strategy.traffic_period]
    topology = strategy.gossip_topology
    if topology is not None:
        graphs = topology.period(ranks) or MIN_TIMED_ROUNDS
        periods.append(graphs // math.gcd(graphs, strategy.rounds))
    return math.lcm(*periods)


def _max_swap_rounds(strategy: Any) -> int:
    """Return the most rounds between two swaps over a link that may lag; 0 without such links."""
    return (strategy.max_message_delay + 1) * strategy.sync_period if strategy.max_message_delay else 0


def _count_different_ranks(simulation: Simulation, links: Links) -> int:
    """Return how many ranks have to be played: all, or those of the first host if all hosts do the same.

    Whether they do is checked for the first ranks of three other hosts.
    """
    ranks = simulation.ranks
    per_host = min(ranks, links.ranks_per_host)
    if ranks == per_host or simulation.slowdown is not no_jitter or not _has_uniform_hosts(links, ranks):
        return ranks
    simulation = dataclasses.replace(
        simulation, rounds=simulation.rounds[: _repeat_period(simulation.run.strategy, ranks)]
    )
    first = simulation.record(0)
    if any(message.members != tuple(range(ranks)) for message in first):
        return ranks
    for other in sorted({per_host, ranks // per_host // 2 * per_host, ranks - per_host}):
        if simulation.record(other) != [message.shifted(other, ranks) for message in first]:
            return ranks
    return per_host


def _has_uniform_hosts(links: Links, ranks: int) -> bool:
    """Return whether all hosts that are used have the same rates and number of ranks."""
    hosts = range(-(-ranks // links.ranks_per_host))
    return (
        not links.pairs and ranks % links.ranks_per_host == 0 and len({links.port_rates(host) for host in hosts}) == 1
    )


def _without_latency(links: Links) -> Links:
    """Return the same links without latency."""
    intra_host = dataclasses.replace(links.intra_host, latency=ZERO_LATENCY_S)
    pairs = {pair: dataclasses.replace(link, latency=ZERO_LATENCY_S) for pair, link in links.pairs.items()}
    latency = None if links.latency is None else ZERO_LATENCY_S
    return dataclasses.replace(links, intra_host=intra_host, pairs=pairs, latency=latency)


def _ideal_links(links: Links) -> Links:
    """Return links between the same hosts that cost nothing."""
    return Links(
        hosts=links.hosts,
        ranks_per_host=links.ranks_per_host,
        up=IDEAL_BYTES_PER_S,
        latency=ZERO_LATENCY_S,
        intra_host=Link(IDEAL_BYTES_PER_S, ZERO_LATENCY_S),
    )


def _mean_staleness(strategy: Any, timelines: Sequence[RankTimeline]) -> float:
    ages = [age for timeline in timelines for age in timeline.staleness_rounds]
    return statistics.fmean(ages or strategy.mean_lags)


def _memory_bytes(run: PlannedRun, profile: Profile, ranks: int, timelines: Sequence[RankTimeline]) -> int:
    """Interpolate the memory that the profiled worker used with this local batch, and add the exchanges' state.

    Where optimizers are sharded, two moments and the average of G are subtracted but for the part of a rank.
    """
    other_bytes = max(timeline.exchange_state_bytes for timeline in timelines)
    if run.strategy.shard_optimizer:
        whole = 4 * (2 * sum(profile.num_params) + profile.num_params[0])
        other_bytes -= whole - whole // ranks
    if not profile.memory:
        return 4 * 4 * sum(profile.num_params) + other_bytes
    points = sorted((m.batch, m.measured_bytes or m.estimated_bytes) for m in profile.memory)
    if len(points) == 1:
        return points[0][1] + other_bytes
    batch = run.batch / ranks
    i = next((i for i in range(1, len(points) - 1) if batch <= points[i][0]), len(points) - 1)
    batch_a, bytes_a = points[i - 1]
    batch_b, bytes_b = points[i]
    interpolated = round(bytes_a + (bytes_b - bytes_a) * (batch - batch_a) / (batch_b - batch_a))
    return max(points[0][1], interpolated) + other_bytes


def _predict_per_label(run: PlannedRun, profile: Profile, links: Links, ranks: int) -> Prediction:
    """Predict independent games, one per label, each on a team of ranks."""
    team = min(ranks, run.strategy.ranks_per_label or 1)
    hosts = -(-team // links.ranks_per_host)
    one = dataclasses.replace(run, strategy=run.strategy.per_label_strategy)  # pyright: ignore[reportArgumentType]
    prediction = predict(one, profile, _first_hosts(links, hosts), team)
    return dataclasses.replace(prediction, images_per_s=prediction.images_per_s * (ranks / team))


def _first_hosts(links: Links, hosts: int) -> Links:
    """Return the links of the first hosts."""
    pairs = {pair: link for pair, link in links.pairs.items() if int(pair.partition("-")[2]) < hosts}
    up, down = (rates[:hosts] if isinstance(rates, list) else rates for rates in (links.up, links.down))
    return dataclasses.replace(links, hosts=hosts, pairs=pairs, up=up, down=down)
