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
from paragan.plan.predict.exchange_trace import Script, shifted
from paragan.plan.predict.rank_schedule import Name, Seat, Wiring
from paragan.plan.predict.simulator import Pace, Played, simulate, steady
from paragan.plan.predict.stub_game import Planned
from paragan.plan.profile.codec_cost import USUAL
from paragan.plan.profile.profile import Profile

WARM_UP = 2  # rounds
ROUNDS = 4  # that count, or a period,
LAPS = 2  # or so many times as many as links may lag
MOST = 32  # rounds of a longer period that are played, around its exchange
FASTEST, NEAREST = 1e15, 0.0  # a network that costs nothing


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
    staleness: float
    spent: Mapping[str, float]


def predict(
    run: Planned,
    profile: Profile,
    links: Links,
    ranks: int | None = None,
    *,
    pace: Pace = steady,
    rounds: int = 0,
) -> Prediction:
    """run: resolved (strategy, batch, lanes, d_steps, g_batch). ranks: as many as the links have, where left out.

    pace: (rank, round) -> a factor on its computing, for stragglers and jitter; rounds: to play, at least, where it
    varies.
    """
    ranks = links.ranks if ranks is None else ranks
    if hasattr(run.strategy, "within"):
        return _per_label(run, profile, links, ranks)
    wiring = Wiring(run, profile, ranks)
    played = Counted(_period(run.strategy, ranks), rounds, _lag(wiring.seat(0)))
    seats = _seats(wiring, links, ranks, played.steps, pace)
    costs = USUAL | dict(profile.handling)

    def of(links: Links) -> list[Played]:
        return simulate(seats, links, ranks, played.steps, costs, warm_up=played.warm_up, pace=pace)

    found = of(links)
    step_s = played.mean(found)
    traffic = max((seat.traffic for seat in seats), key=lambda t: t.sent_bytes)
    share = 1.0 if not seats[0].lagging else played.sent_bytes(found) / traffic.sent_bytes
    return Prediction(
        step_s=step_s,
        images_per_s=run.round / step_s,
        compute_s=max(one.computing for one in found) / played.count,
        efficiency=profile.round_s(run.batch / ranks) / step_s,
        sent_bytes=round(share * traffic.sent_bytes),
        messages=round(share * traffic.messages),
        memory_bytes=_memory(run, profile, ranks, seats),
        staleness=_staleness(seats, found),
        spent=played.spent(found, near=of(_near(links)), free=of(_free(links))),
    )


@dataclass(frozen=True)
class Counted:
    """Which rounds of a period are played, and their mean. lag: for how many of them links may lag, after which a round
    is what it stays."""

    period: int
    least: int = 0
    lag: int = 0

    @property
    def warm_up(self) -> int:
        return WARM_UP + self.lag * self.whole

    @property
    def whole(self) -> bool:
        return self.period <= MOST

    @property
    def steps(self) -> range:
        if not self.whole:  # the exchange is at the end of a period, or at the beginning
            return range(self.period - MOST // 2, self.period + MOST // 2)
        count = self.period * -(-max(ROUNDS, self.least, LAPS * self.lag) // self.period)
        return range(self.warm_up + count)

    @property
    def count(self) -> int:
        """Of rounds that are played and timed."""
        return len(self.steps) - self.warm_up

    def sent_bytes(self, found: Sequence[Played]) -> float:
        """Of a round, of the rank that sends most."""
        return max(one.sent_bytes for one in found) / (self.count if self.whole else self.period)

    def mean(self, found: Sequence[Played]) -> float:
        """Seconds of a round, of the slowest rank."""
        total = max(one.ended - one.began for one in found)
        if self.whole:
            return total / self.count
        quiet = max(statistics.median(one.rounds) for one in found)
        return (total + quiet * (self.period - self.count)) / self.period

    def spent(self, found: Sequence[Played], *, near: Sequence[Played], free: Sequence[Played]) -> dict[str, float]:
        """Seconds of a round by reason. near: the same without latency; free: nor with bounds on rates."""
        slowest, step_s = max(found, key=lambda one: one.ended), self.mean(found)
        spent = {
            "computing": slowest.computing / self.count,
            "handling": slowest.handling / self.count,
            "latency": max(0.0, step_s - self.mean(near)),
            "bandwidth": max(0.0, self.mean(near) - self.mean(free)),
        }
        return spent | {"waiting": max(0.0, step_s - sum(spent.values()))}


def _period(strategy: Any, ranks: int) -> int:
    """After how many rounds everything repeats."""
    names = ("every", "snapshot_every", "local_steps")
    periods = [getattr(strategy, name, 1) for name in names]
    topology = getattr(strategy, "topology", None)
    if topology is not None:
        graphs = topology.period(ranks) or ROUNDS
        periods.append(graphs // math.gcd(graphs, getattr(strategy, "rounds", 1)))
    return math.lcm(*periods)


def _lag(seat: Seat) -> int:
    """Rounds from one swap over a link that lags to the next, at most: it is waited for, and then another begins."""
    return max(((lagging.late + 1) * lagging.every for lagging in seat.lagging.values()), default=0)


def _seats(wiring: Wiring, links: Links, ranks: int, steps: range, pace: Pace) -> list[Seat]:
    """Of the first host's ranks, where all hosts do the same; else of all."""
    each = min(ranks, links.ranks_per_host)
    first = [wiring.seat(rank) for rank in range(each)]
    if ranks > each and _even(links, ranks) and pace is steady and not first[0].posts and not first[0].lagging:
        others = [wiring.seat(rank) for rank in sorted({each, ranks // each // 2 * each, ranks - each})]
        if all(_same(first[0], other, steps, ranks) for other in others):
            return first
    return first + [wiring.seat(rank) for rank in range(each, ranks)]


def _even(links: Links, ranks: int) -> bool:
    """Whether all hosts that are used are alike."""
    hosts = range(-(-ranks // links.ranks_per_host))
    return not links.pairs and ranks % links.ranks_per_host == 0 and len({links.port(host) for host in hosts}) == 1


def _same(first: Seat, other: Seat, steps: range, ranks: int) -> bool:
    """Whether a rank does what the first one does, with neighbours as far away."""

    def of(seat: Seat, by: int) -> list[list[Script]]:
        players: dict[Name, None] = dict.fromkeys(part.player for beat in seat.beats for part in beat)
        return [[shifted(s, by, ranks) for s in seat.script(name, step)] for name in players for step in steps]

    return first.beats == other.beats and of(first, other.rank) == of(other, 0)


def _near(links: Links) -> Links:
    """The same without latency."""
    within = dataclasses.replace(links.within, latency=NEAREST)
    pairs = {pair: dataclasses.replace(link, latency=NEAREST) for pair, link in links.pairs.items()}
    latency = None if links.latency is None else NEAREST
    return dataclasses.replace(links, within=within, pairs=pairs, latency=latency)


def _free(links: Links) -> Links:
    """A network of as many hosts that costs nothing."""
    return Links(
        hosts=links.hosts,
        ranks_per_host=links.ranks_per_host,
        up=1e13,
        latency=NEAREST,
        within=Link(1e13, NEAREST),
    )


def _staleness(seats: Sequence[Seat], found: Sequence[Played]) -> float:
    ages = [age for one in found for age in one.ages]
    return statistics.fmean(ages) if ages else statistics.fmean(seats[0].lags)


def _memory(run: Planned, profile: Profile, ranks: int, seats: Sequence[Seat]) -> int:
    """What the worker took with such a batch, and what exchanges keep."""
    kept = max(seat.kept() for seat in seats)
    if not profile.memory:
        return 4 * 4 * sum(profile.params) + kept
    batch = run.batch / ranks
    took = sorted((m.batch, m.took or m.foreseen) for m in profile.memory)
    if len(took) == 1:
        return took[0][1] + kept
    i = next((i for i in range(1, len(took) - 1) if batch <= took[i][0]), len(took) - 1)
    (a, low), (b, high) = took[i - 1], took[i]
    return max(took[0][1], round(low + (high - low) * (batch - a) / (b - a))) + kept


def _per_label(run: Planned, profile: Profile, links: Links, ranks: int) -> Prediction:
    """Games that tell each other nothing, each on some ranks (or one)."""
    team = min(ranks, run.strategy.ranks or 1)
    hosts = -(-team // links.ranks_per_host)
    one = dataclasses.replace(run, strategy=run.strategy.within)  # pyright: ignore[reportArgumentType]
    found = predict(one, profile, _first(links, hosts), team)
    return dataclasses.replace(found, images_per_s=found.images_per_s * (ranks / team))


def _first(links: Links, hosts: int) -> Links:
    """Of the first hosts alone."""
    pairs = {pair: link for pair, link in links.pairs.items() if int(pair.partition("-")[2]) < hosts}
    up, down = (rates[:hosts] if isinstance(rates, list) else rates for rates in (links.up, links.down))
    return dataclasses.replace(links, hosts=hosts, pairs=pairs, up=up, down=down)
