"""What a round takes with any strategy, from one worker's profile, the links, and the strategy's own wiring.

    p = predict(run, read_profile(Path("profile.yaml")), described("8 hosts, 200 Mbit/s, 10 ms"))
    p.step_s, p.images_per_s, p.spent

The strategy wires a game of blank vectors (standin, seats), its exchanges say what they send (script), and some rounds
are played in counted time (simulate). docs/prediction.md says what is assumed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paragan.plan.links import Link, Links
from paragan.plan.predict.exchange_trace import TraceOps, shift_ranks
from paragan.plan.predict.rank_schedule import PlayerName, RankSchedule, ScheduleBuilder
from paragan.plan.predict.simulator import RankTimeline, Slowdown, no_jitter, simulate_rounds
from paragan.plan.predict.stub_game import PlannedRun
from paragan.plan.profile.codec_cost import DEFAULT_CODEC_COST
from paragan.plan.profile.profile import Profile

WARM_UP_ROUNDS = 2  # rounds
MIN_TIMED_ROUNDS = 4  # that count, or a period,
ROUNDS_PER_LAG = 2  # or so many times as many as links may lag
MAX_PERIOD_ROUNDS = 32  # rounds of a longer period that are played, around its exchange
UNBOUNDED_BYTES_PER_S, ZERO_LATENCY_S = 1e15, 0.0  # a network that costs nothing


@dataclass(frozen=True)
class Prediction:
    """One strategy on some ranks.

    step_s       : seconds of a round, the mean over rounds, of the slowest rank
    images_per_s : reals of all ranks
    compute_s    : the computing in a round of the rank that computes longest
    efficiency   : images a second, over those of as many workers that play alone with this local batch
    sent_bytes, messages : of a round, the mean over rounds, of the rank that sends most
    memory_bytes : of a rank, at the fullest moment of a round
    staleness    : how many rounds old what a player sees of the other is (with links that lag: what it hears of its
                   neighbours), the mean; 0 in lockstep
    spent        : step_s by reason. computing, handling: of the slowest rank; latency: what a network without any
                   would save; bandwidth: what one without bounds would save then; waiting: for others, the rest
    """

    step_s: float
    images_per_s: float
    compute_s: float
    efficiency: float
    sent_bytes: int
    messages: int
    memory_bytes: int
    staleness_rounds: float
    breakdown_s: Mapping[str, float]


def predict(
    run: PlannedRun,
    profile: Profile,
    links: Links,
    ranks: int | None = None,
    *,
    slowdown: Slowdown = no_jitter,
    min_rounds: int = 0,
) -> Prediction:
    """run: resolved (strategy, batch, lanes, d_steps, g_batch). ranks: as many as the links have, where left out.

    pace: (rank, round) -> a factor on its computing, for stragglers and jitter; rounds: to play, at least, where it
    varies.
    """
    ranks = links.ranks if ranks is None else ranks
    if run.strategy.per_label:
        return _predict_per_label(run, profile, links, ranks)
    wiring = ScheduleBuilder(run, profile, ranks)
    played = RoundWindow(_repeat_period(run.strategy, ranks), min_rounds, _max_swap_rounds(wiring.build(0)))
    seats = _build_schedules(wiring, links, ranks, played.steps, slowdown)
    costs = DEFAULT_CODEC_COST | dict(profile.codec_cost)

    def simulate_on(links: Links) -> list[RankTimeline]:
        return simulate_rounds(
            seats, links, ranks, played.steps, costs, warm_up_rounds=played.warm_up_rounds, slowdown=slowdown
        )

    found = simulate_on(links)
    step_s = played.mean_round_s(found)
    traffic = max((seat.traffic for seat in seats), key=lambda t: t.sent_bytes)
    share = 1.0 if not seats[0].async_links else played.sent_bytes(found) / traffic.sent_bytes
    return Prediction(
        step_s=step_s,
        images_per_s=run.round_images / step_s,
        compute_s=max(one.compute_s for one in found) / played.num_timed,
        efficiency=profile.round_s(run.batch / ranks) / step_s,
        sent_bytes=round(share * traffic.sent_bytes),
        messages=round(share * traffic.messages),
        memory_bytes=_memory_bytes(run, profile, ranks, seats),
        staleness_rounds=_mean_staleness(seats, found),
        breakdown_s=played.breakdown_s(
            found, without_latency=simulate_on(_without_latency(links)), on_ideal_links=simulate_on(_ideal_links(links))
        ),
    )


@dataclass(frozen=True)
class RoundWindow:
    """Which rounds of a period are played, and their mean. lag: for how many of them links may lag, after which a round
    is what it stays."""

    period: int
    min_rounds: int = 0
    lag_rounds: int = 0

    @property
    def warm_up_rounds(self) -> int:
        return WARM_UP_ROUNDS + self.lag_rounds * self.covers_period

    @property
    def covers_period(self) -> bool:
        return self.period <= MAX_PERIOD_ROUNDS

    @property
    def steps(self) -> range:
        if not self.covers_period:  # the exchange is at the end of a period, or at the beginning
            return range(self.period - MAX_PERIOD_ROUNDS // 2, self.period + MAX_PERIOD_ROUNDS // 2)
        count = self.period * -(
            -max(MIN_TIMED_ROUNDS, self.min_rounds, ROUNDS_PER_LAG * self.lag_rounds) // self.period
        )
        return range(self.warm_up_rounds + count)

    @property
    def num_timed(self) -> int:
        """Of rounds that are played and timed."""
        return len(self.steps) - self.warm_up_rounds

    def sent_bytes(self, timelines: Sequence[RankTimeline]) -> float:
        """Of a round, of the rank that sends most."""
        return max(one.sent_bytes for one in timelines) / (self.num_timed if self.covers_period else self.period)

    def mean_round_s(self, timelines: Sequence[RankTimeline]) -> float:
        """Seconds of a round, of the slowest rank."""
        total = max(one.end_s - one.start_s for one in timelines)
        if self.covers_period:
            return total / self.num_timed
        quiet = max(statistics.median(one.rounds_s) for one in timelines)
        return (total + quiet * (self.period - self.num_timed)) / self.period

    def breakdown_s(
        self,
        timelines: Sequence[RankTimeline],
        *,
        without_latency: Sequence[RankTimeline],
        on_ideal_links: Sequence[RankTimeline],
    ) -> dict[str, float]:
        """Seconds of a round by reason. near: the same without latency; free: nor with bounds on rates."""
        slowest, step_s = max(timelines, key=lambda one: one.end_s), self.mean_round_s(timelines)
        spent = {
            "computing": slowest.compute_s / self.num_timed,
            "handling": slowest.codec_s / self.num_timed,
            "latency": max(0.0, step_s - self.mean_round_s(without_latency)),
            "bandwidth": max(0.0, self.mean_round_s(without_latency) - self.mean_round_s(on_ideal_links)),
        }
        return spent | {"waiting": max(0.0, step_s - sum(spent.values()))}


def _repeat_period(strategy: Any, ranks: int) -> int:
    """After how many rounds everything repeats."""
    periods = [strategy.traffic_period]
    topology = strategy.gossip_topology
    if topology is not None:
        graphs = topology.period(ranks) or MIN_TIMED_ROUNDS
        periods.append(graphs // math.gcd(graphs, strategy.rounds))
    return math.lcm(*periods)


def _max_swap_rounds(schedule: RankSchedule) -> int:
    """Rounds from one swap over a link that lags to the next, at most: it is waited for, and then another begins."""
    return max(
        ((lagging.max_staleness + 1) * lagging.sync_period for lagging in schedule.async_links.values()), default=0
    )


def _build_schedules(
    builder: ScheduleBuilder, links: Links, ranks: int, steps: range, slowdown: Slowdown
) -> list[RankSchedule]:
    """Of the first host's ranks, where all hosts do the same; else of all."""
    each = min(ranks, links.ranks_per_host)
    first = [builder.build(rank) for rank in range(each)]
    if (
        ranks > each
        and _has_uniform_hosts(links, ranks)
        and slowdown is no_jitter
        and not first[0].team_messages
        and not first[0].async_links
    ):
        others = [builder.build(rank) for rank in sorted({each, ranks // each // 2 * each, ranks - each})]
        if all(_is_equivalent(first[0], other, steps, ranks) for other in others):
            return first
    return first + [builder.build(rank) for rank in range(each, ranks)]


def _has_uniform_hosts(links: Links, ranks: int) -> bool:
    """Whether all hosts that are used are alike."""
    hosts = range(-(-ranks // links.ranks_per_host))
    return (
        not links.pairs and ranks % links.ranks_per_host == 0 and len({links.port_rates(host) for host in hosts}) == 1
    )


def _is_equivalent(first: RankSchedule, other: RankSchedule, steps: range, ranks: int) -> bool:
    """Whether a rank does what the first one does, with neighbours as far away."""

    def shifted_ops(schedule: RankSchedule, offset: int) -> list[list[TraceOps]]:
        players: dict[PlayerName, None] = dict.fromkeys(part.player for beat in schedule.turn_groups for part in beat)
        return [
            [shift_ranks(s, offset, ranks) for s in schedule.exchange_ops(name, step)]
            for name in players
            for step in steps
        ]

    return first.turn_groups == other.turn_groups and shifted_ops(first, other.rank) == shifted_ops(other, 0)


def _without_latency(links: Links) -> Links:
    """The same without latency."""
    within = dataclasses.replace(links.intra_host, latency=ZERO_LATENCY_S)
    pairs = {pair: dataclasses.replace(link, latency=ZERO_LATENCY_S) for pair, link in links.pairs.items()}
    latency = None if links.latency is None else ZERO_LATENCY_S
    return dataclasses.replace(links, intra_host=within, pairs=pairs, latency=latency)


def _ideal_links(links: Links) -> Links:
    """A network of as many hosts that costs nothing."""
    return Links(
        hosts=links.hosts,
        ranks_per_host=links.ranks_per_host,
        up=1e13,
        latency=ZERO_LATENCY_S,
        intra_host=Link(1e13, ZERO_LATENCY_S),
    )


def _mean_staleness(schedules: Sequence[RankSchedule], timelines: Sequence[RankTimeline]) -> float:
    ages = [age for one in timelines for age in one.staleness_rounds]
    return statistics.fmean(ages) if ages else statistics.fmean(schedules[0].mean_lags)


def _memory_bytes(run: PlannedRun, profile: Profile, ranks: int, schedules: Sequence[RankSchedule]) -> int:
    """What the worker took with such a batch, and what exchanges keep."""
    kept = max(seat.exchange_state_bytes() for seat in schedules)
    if not profile.memory:
        return 4 * 4 * sum(profile.num_params) + kept
    batch = run.batch / ranks
    took = sorted((m.batch, m.measured_bytes or m.estimated_bytes) for m in profile.memory)
    if len(took) == 1:
        return took[0][1] + kept
    i = next((i for i in range(1, len(took) - 1) if batch <= took[i][0]), len(took) - 1)
    (a, low), (b, high) = took[i - 1], took[i]
    return max(took[0][1], round(low + (high - low) * (batch - a) / (b - a))) + kept


def _predict_per_label(run: PlannedRun, profile: Profile, links: Links, ranks: int) -> Prediction:
    """Games that tell each other nothing, each on some ranks (or one)."""
    team = min(ranks, run.strategy.ranks_per_label or 1)
    hosts = -(-team // links.ranks_per_host)
    one = dataclasses.replace(run, strategy=run.strategy.per_label_strategy)  # pyright: ignore[reportArgumentType]
    found = predict(one, profile, _first_hosts(links, hosts), team)
    return dataclasses.replace(found, images_per_s=found.images_per_s * (ranks / team))


def _first_hosts(links: Links, hosts: int) -> Links:
    """Of the first hosts alone."""
    pairs = {pair: link for pair, link in links.pairs.items() if int(pair.partition("-")[2]) < hosts}
    up, down = (rates[:hosts] if isinstance(rates, list) else rates for rates in (links.up, links.down))
    return dataclasses.replace(links, hosts=hosts, pairs=pairs, up=up, down=down)
