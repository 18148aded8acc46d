"""Rounds of up to 100,000 workers, as arrays: each begins when it is done and what it waits for has arrived.

seen = simulate(strategy_of("gossip"), job, Crowd(100_000, up=2.5e6, down=12.5e6, latency=0.04, leaving=0.01))
seen.images_per_s, seen.sent_bytes_per_h, seen.apart

Workers differ, vary from round to round, leave and are replaced by others who fetch the state from one who is there;
all of it by seed. What ranks hold is one number each, moved by 1 a step at random and mixed as parameters are: `apart`
is how far ranks are from their mean, in steps. docs/plan.md says what is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paragan.core.errors import Unusable
from paragan.core.rng import generator
from paragan.plan.large_scale.mixing_rate import rounds_to
from paragan.plan.large_scale.round_time import Job, Summing
from paragan.plan.links import WITHIN, Link
from paragan.strategies.async_paragan import Async
from paragan.strategies.auto import Auto
from paragan.strategies.gd_teams import counts, even
from paragan.strategies.gossip_dposg import Decentralized
from paragan.strategies.per_label_wcgan import PerLabel

Floats = NDArray[np.float64]
HOUR = 3600.0
WARM_UP = 8  # rounds
TRACES = 8  # numbers of which ranks hold one each
FINAL = 1e4  # attempts after which a round is said never to end


@dataclass(frozen=True)
class Crowd:
    """Workers and what lies between them.

    up, down : bytes a second of the median worker;  differ : spread of rates (sigma of a lognormal)
    speeds   : spread of how fast they compute;  jitter : of a worker's rounds
    leaving  : share of them that leaves in an hour; as many join
    notice_s : until others know that one has left;  form_s : until all have met again, where all are needed
    """

    workers: int
    up: float
    down: float
    latency: float
    differ: float = 0.0
    speeds: float = 0.0
    jitter: float = 0.0
    leaving: float = 0.0
    notice_s: float = 0.5
    form_s: float = 30.0
    seed: int = 0

    @property
    def losses_s(self) -> float:
        """A second, of all."""
        return self.workers * self.leaving / HOUR


@dataclass(frozen=True)
class Seen:
    """What was simulated. computing: share of the time;  apart: of ranks from their mean, in steps (inf: they never
    meet);  mixes: rounds until 1 % of a distance between ranks is left;  broken: attempts at a round that a loss ended,
    for one that came to its end;  stale: mean age of what is heard, in rounds"""

    workers: int
    rounds: int
    seconds: float
    images_per_s: float
    sent_bytes_per_h: float
    joiners_bytes_per_h: float
    computing: float
    apart: float
    mixes: float
    broken: float
    stale: float = 0.0

    @property
    def rounds_per_h(self) -> float:
        return HOUR * self.rounds / self.seconds


def simulate(
    strategy: Any,
    job: Job,
    crowd: Crowd,
    *,
    rounds: int = 64,
    hours: float = 1.0,
    groups: int = 1,
    within: Link = WITHIN,
) -> Seen:
    """Play so many rounds, or so many hours if that is less. groups: sums go round in rings of so many ranks, over
    `within`, then among these (sync)."""
    if isinstance(strategy, Auto):
        raise Unusable("strategy=auto is chosen when ranks have met, and not simulated: name those to compare")
    if isinstance(strategy, PerLabel):
        return _Apart(job, crowd, alone=True).play(rounds, hours)
    if isinstance(strategy, Async):
        return _teams(strategy, job, crowd, rounds, hours)
    if isinstance(strategy, Decentralized):
        return _Apart(job, crowd, strategy).play(rounds, hours)
    return _summed(_summing(strategy, job, groups, within), strategy.every, job, crowd, rounds, hours)


class People:
    """Who they are: rates and speeds by worker, and what changes."""

    def __init__(self, crowd: Crowd):
        self.crowd, n = crowd, crowd.workers
        self.rng = generator(crowd.seed, "crowd")
        self.up, self.down = (rate * self._spread(crowd.differ) for rate in (crowd.up, crowd.down))
        self.speed = self._spread(crowd.speeds)
        self.n = n

    def _spread(self, sigma: float) -> Floats:
        return np.exp(sigma * self.rng.standard_normal(self.crowd.workers)) if sigma else np.ones(self.crowd.workers)

    def factors(self) -> Floats:
        """On this round's computing."""
        return self.speed * self._spread(self.crowd.jitter)

    def fetching_s(self, nbytes: float) -> float:
        """A joiner's, from one that plays on."""
        return 2 * self.crowd.latency + nbytes / min(self.crowd.up, self.crowd.down)


# all together -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Together:
    """Rounds that all play at once, each as long as the slowest; one that sums and loses somebody is begun again, when
    all have met. round_s: of a step, where the slowest computes so many times as long;  sent: bytes of a worker in a
    round;  every: rounds, of which one sums;  stale: age of what is heard"""

    job: Job
    crowd: Crowd
    people: People
    round_s: Callable[[int, float], float]
    sent: float
    every: int = 1
    stale: float = 0.0

    def play(self, rounds: int, hours: float) -> Seen:
        seconds, computing, broken, done = 0.0, 0.0, 0, 0
        forming = self.crowd.form_s + self.people.fetching_s(self.job.state_bytes)
        while done < rounds and seconds < hours * HOUR:
            factors = self.people.factors()
            takes = self.round_s(done, float(factors.max()))
            attempts = [] if done % self.every else self._attempts(takes)  # whom nobody waits for is not missed
            broken += len(attempts)
            if len(attempts) >= FINAL:
                seconds = hours * HOUR
                break
            seconds, done = seconds + sum(attempts) + len(attempts) * forming + takes, done + 1
            computing += float(factors.mean()) * self.job.alone_s
        joined = self.crowd.leaving * self.job.state_bytes
        return Seen(
            workers=self.crowd.workers,
            rounds=done,
            seconds=seconds,
            images_per_s=done * self.job.images * self.job.d.steps * self.crowd.workers / seconds,
            sent_bytes_per_h=HOUR * self.sent * done / seconds + joined,
            joiners_bytes_per_h=joined,
            computing=computing / seconds,
            apart=math.sqrt((self.every - 1) / 2),
            mixes=float(self.every),
            broken=broken / max(1, done),
            stale=self.stale,
        )

    def _attempts(self, seconds: float) -> list[float]:
        """How long each lasted that a loss ended, before one that none did."""
        lost, rate = list[float](), self.crowd.losses_s
        if not rate:
            return lost
        if rate * seconds > math.log(FINAL):
            return [1 / rate] * int(FINAL)
        while (until := self.people.rng.exponential(1 / rate)) < seconds:
            lost.append(until)
        return lost


def _summed(summing: Summing, every: int, job: Job, crowd: Crowd, rounds: int, hours: float) -> Seen:
    people, n = People(crowd), crowd.workers
    link = Link(float(min(people.up.min(), people.down.min())), crowd.latency)

    def round_s(step: int, factor: float) -> float:
        own = factor * job.alone_s
        if every == 1:
            return sum(half.steps * summing.turn_s(half, n, link, factor) for half in (job.d, job.g))
        if step % every:
            return own
        return own + sum(half.steps * summing.apart_s(half, n, link) for half in (job.d, job.g))

    sent = job.numbers / every * summing.sent_bytes(1e6, n) / 1e6
    return _Together(job, crowd, people, round_s, sent, every).play(rounds, hours)


def _summing(strategy: Any, job: Job, groups: int = 1, within: Link = WITHIN) -> Summing:
    handling = job.handling_s(strategy.wire, passes=2) if strategy.wire.lossy else 0.0
    return Summing(strategy.wire, handling, groups, within)


def _teams(strategy: Async, job: Job, crowd: Crowd, rounds: int, hours: float) -> Seen:
    """Those who play G beside those who play D; each team sums by itself, images and snapshots pass between them."""
    people, summing, n = People(crowd), _summing(strategy, job), crowd.workers
    if strategy.split == "none":
        return _summed(summing, strategy.every, job, crowd, rounds, hours)
    d_s, g_s = job.d.steps * job.d.turn.whole, job.g.turn.whole
    g, d = counts(strategy.split) if ":" in strategy.split else even(g_s, d_s, n)
    link = Link(float(min(people.up.min(), people.down.min())), crowd.latency)
    snapshot = strategy.snapshot_wire.nbytes(job.d.numbers) / strategy.snapshot_every
    posted = 2 * crowd.latency + snapshot / link.bandwidth

    def round_s(step: int, factor: float) -> float:
        summed = step % strategy.every == 0
        of_g = summing.turn_s(job.g, g if summed else 1, link, factor * n / g)
        of_d = job.d.steps * summing.turn_s(job.d, d if summed else 1, link, factor * n / d)
        return max(of_g, of_d) + (posted if strategy.lead == 1 else 0.0)

    sent = summing.sent_bytes(1e6, n) / 1e6 * (g * job.g.numbers + d * job.d.numbers * job.d.steps) / n / strategy.every
    stale = float(strategy.lead - 1) + (strategy.snapshot_every - 1) / 2
    sent += snapshot * g / n
    return _Together(job, crowd, people, round_s, sent, strategy.every, stale).play(rounds, hours)


# each with a few ----------------------------------------------------------------------------------------


@dataclass
class _Apart:
    """Every worker has a clock of its own. What it waits for: nothing (alone), or what its peers sent when they began
    this round; with staleness on a ring, swaps that were begun so many rounds ago."""

    job: Job
    crowd: Crowd
    strategy: Any = None
    alone: bool = False
    people: People = field(init=False)

    def __post_init__(self) -> None:
        self.people, n = People(self.crowd), self.crowd.workers
        self.begins, self.computing = np.zeros(n), np.zeros(n)
        self.held = np.zeros((TRACES, n))
        self.sent, self.lost, self.ages = 0.0, 0, list[float]()
        self.gone = np.zeros(n, bool)  # who has left in the last round: nobody hears from it
        self.swap = _Swaps(n) if self.strategy is not None and self.strategy.staleness else None

    def play(self, rounds: int, hours: float) -> Seen:
        done, marks, sums = 0, [0.0, 0.0, 0.0], list[float]()
        for step in range(WARM_UP + rounds):
            if step == WARM_UP:
                marks = [self._now(), float(self.computing.mean()), self.sent]
            if step > WARM_UP and self._now() - marks[0] > hours * HOUR:
                break
            self._round(step)
            done += step >= WARM_UP
            sums.append(self._distance())
        seconds, n = self._now() - marks[0], self.crowd.workers
        joined = self.crowd.leaving * self.job.state_bytes
        return Seen(
            workers=n,
            rounds=done,
            seconds=seconds,
            images_per_s=done * self.job.images * self.job.d.steps * n / seconds,
            sent_bytes_per_h=HOUR * (self.sent - marks[2]) / n / seconds + joined,
            joiners_bytes_per_h=joined,
            computing=(float(self.computing.mean()) - marks[1]) / seconds,
            apart=math.inf if self.alone else float(np.mean(sums[-max(1, len(sums) // 4) :])),
            mixes=math.inf if self.alone else rounds_to(0.01, self.strategy, n),
            broken=0.0,
            stale=float(np.mean(self.ages)) if self.ages else 0.0,
        )

    def _now(self) -> float:
        return float(self.begins.mean())

    def _distance(self) -> float:
        centred = self.held - self.held.mean(1, keepdims=True)
        return float(np.sqrt((centred**2).mean()))

    def _round(self, step: int) -> None:
        computes = self.people.factors() * self.job.alone_s
        ends = self.begins + computes
        self.computing += computes
        if self.swap is not None:
            ends = self._swapped(step, ends)
        elif not self.alone and (step + 1) % self.strategy.local_steps == 0:
            first = step // self.strategy.local_steps * self.strategy.rounds
            for mix in range(first, first + self.strategy.rounds):
                ends = self._heard(mix, ends)
        self.held += self.people.rng.standard_normal(self.held.shape)
        self._churn(ends - self.begins)
        self.begins = np.where(self.gone, ends + self.people.fetching_s(self.job.state_bytes), ends)

    def _churn(self, took: Floats) -> None:
        """Some leave; whoever comes in their place has what one of the others holds."""
        chance = -np.expm1(-self.crowd.leaving * took / HOUR)
        self.gone = self.people.rng.random(self.crowd.workers) < chance
        there = np.flatnonzero(self.gone)
        self.lost += len(there)
        self.held[:, there] = self.held[:, self.people.rng.integers(0, self.crowd.workers, len(there))]

    def _peers(self, step: int) -> tuple[list[NDArray[np.int64]], float]:
        """Whom every worker hears, one array for each message; and the weight of each."""
        n, name = self.crowd.workers, self.strategy.topology.name
        places = np.arange(n)
        if name == "one-peer":
            return [(places - (1 << step % max(1, (n - 1).bit_length()))) % n], 1 / 2
        if name == "ring":
            return [(places - 1) % n, (places + 1) % n], 1 / 3
        order = generator(self.crowd.seed, "graph", position=step).permutation(n)
        where = np.empty(n, np.int64)
        where[order] = places
        if name == "random-ring":
            return [order[(where - 1) % n], order[(where + 1) % n]], 1 / 3
        if name == "matching":
            other = np.where(where % 2 == 0, where + 1, where - 1)
            return [order[np.where(other < n, other, where)]], 1 / 2
        raise Unusable(f"strategy.topology={name} is not simulated: one-peer, ring, random-ring and matching are")

    def _heard(self, step: int, ends: Floats) -> Floats:
        """A message leaves when both have begun the round and the question has travelled; ports are shared."""
        peers, weight = self._peers(step)
        nbytes, wire = self._vector(), self.strategy.wire
        handled = self.job.numbers * self.job.handling_s(wire, passes=5 if wire.lossy else 3)
        heard = self.held * (1 - weight * len(peers))
        for peer in peers:
            rate = np.minimum(self.people.up[peer], self.people.down) / len(peers)
            asked = np.maximum(self.begins[peer], self.begins + self.crowd.latency)
            arrives = asked + self.crowd.latency + nbytes / rate
            missing = self.gone[peer]
            arrives = np.where(missing, self.begins + self.crowd.notice_s, arrives)
            ends = np.where(peer == np.arange(len(peer)), ends, np.maximum(ends, arrives))
            heard += weight * np.where(missing, self.held, self.held[:, peer])
        self.held = heard
        ends = ends + handled
        self.sent += nbytes * len(peers) * self.crowd.workers
        return ends

    def _vector(self) -> float:
        """Bytes of a message: parameters of both players."""
        return self.strategy.wire.nbytes(self.job.numbers)

    def _swapped(self, step: int, ends: Floats) -> Floats:
        """On a ring: edge i joins i and i + 1. Both ends post, and mix when both have the other's, or must."""
        if self.strategy.topology.name != "ring":
            raise Unusable(f"strategy.staleness is simulated on a ring, not on {self.strategy.topology.name}")
        assert self.swap is not None
        n, swap, nbytes = self.crowd.workers, self.swap, self._vector()
        after = np.roll(np.arange(n), -1)
        broken = self.gone | self.gone[after]
        new = swap.begun < 0
        rate = np.minimum(self.people.up, self.people.up[after]) / 2  # both links of a worker share its port
        asked = np.maximum(self.begins, self.begins[after]) + self.crowd.latency
        swap.over[new] = (asked + self.crowd.latency + nbytes / rate)[new]
        swap.begun[new] = step
        swap.apart[:, new] = (self.held[:, after] - self.held)[:, new]
        self.sent += 2 * nbytes * float(new.sum())
        swap.over[broken] = (self.begins + self.crowd.notice_s)[broken]
        forced = step - swap.begun >= self.strategy.staleness
        waits = np.where(forced, swap.over, 0.0)
        ends = np.maximum(ends, np.maximum(waits, np.roll(waits, 1)))
        here = swap.over <= np.minimum(ends, ends[after])
        if here.any():
            self.ages.append(float((step - swap.begun)[here].mean()))
        moved = np.where(here & ~broken, swap.apart / 3, 0.0)
        self.held += moved - np.roll(moved, 1, axis=1)
        swap.begun[here] = -1
        return ends


class _Swaps:
    """One swap on each edge of a ring: the round in which it was begun (-1: none is), when it is over, and how far both
    ends were apart then."""

    def __init__(self, n: int):
        self.begun, self.over = np.full(n, -1), np.zeros(n)
        self.apart = np.zeros((TRACES, n))
