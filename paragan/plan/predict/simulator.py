"""A run of some rounds in counted time: every rank plays its turns, its exchanges send, and ports are shared.

What is played follows game/turn.py, comm/flat.py, game/posted.py and comm/late.py line by line; what is sent, the
exchanges' own scripts (plan/foreseen/script.py). Nothing is random unless `pace` is.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paragan.comm.bucket import ARRIVED, GRADIENT, TURN, Moment
from paragan.plan.links import Links
from paragan.plan.predict.event_loop import Clock, Happening, Process, Threads
from paragan.plan.predict.exchange_trace import Handle, Post, Script, Until, Wait
from paragan.plan.predict.network import UNDER_WAY, Key, Network, all_gather, all_reduce, all_to_all
from paragan.plan.predict.rank_schedule import Lagging, Name, Part, Posts, Seat

Pace = Callable[[int, int], float]  # (rank, round) -> the factor on its computing
WORD = 8  # bytes of a round's number
MESSAGES, LEAST = 60_000, 8  # of collectives that are played one by one; segments of each, at least


@dataclass(frozen=True)
class Yielded:
    """What an exchange waits for."""

    awaited: Moment | Happening


Exchanging = Generator[float | Happening | Yielded]


@dataclass(frozen=True)
class Played:
    """Of one rank, in the rounds that counted: seconds since the beginning when they began and ended; seconds spent;
    bytes sent; the mean age of what it saw, in rounds."""

    began: float
    ended: float
    rounds: tuple[float, ...]
    computing: float
    handling: float
    sent_bytes: int
    ages: tuple[int, ...]


def steady(rank: int, step: int) -> float:
    return 1.0


def simulate(
    seats: Sequence[Seat],
    links: Links,
    ranks: int,
    rounds: range,
    handling: Mapping[str, float],
    *,
    warm_up: int = 2,
    pace: Pace = steady,
) -> list[Played]:
    """Play the rounds on every seat; the first `warm_up` do not count. Where only the first host is seated, the others
    are taken to do the same (`network.folded`)."""
    clock = Clock()
    network = Network(clock, links, ranks, folded=len(seats) < ranks, most=_most(seats, len(rounds)))
    players = [Rank(seat, clock, network, handling, pace) for seat in seats]
    under_way = {seat.rank for seat in seats}
    for player in players:
        clock.start(player.play(rounds, under_way))
    clock.run()
    assert not under_way, "ranks wait for what never comes"
    return [player.played(warm_up) for player in players]


def _most(seats: Sequence[Seat], rounds: int) -> int:
    """As many segments of a collective as leave a bounded number of messages in all."""
    buckets = sum(len(part.filled) for beat in seats[0].beats for part in beat)
    return max(LEAST, MESSAGES // (2 * rounds * buckets * len(seats)))


class Rank:
    """One rank, playing."""

    def __init__(self, seat: Seat, clock: Clock, network: Network, handling: Mapping[str, float], pace: Pace):
        self.seat, self.clock, self.network, self.costs, self.pace = seat, clock, network, handling, pace
        self.flats: dict[Name, Flat] = {}
        for part in (part for beat in seat.beats for part in beat):
            self.flats.setdefault(part.player, Flat(self, part.player, len(part.filled)))
        self.mail = Mail(self, seat.posts) if seat.posts else None
        self.computing = self.handling = 0.0
        self.marks: list[tuple[float, float, float, int]] = []
        self.ages: list[int] = []
        self._threads: dict[tuple[int, ...], Threads] = {}
        self._counts: dict[tuple[int, ...], int] = {}

    def play(self, rounds: range, under_way: set[int]) -> Process:
        """under_way: the ranks whose rounds are not over. Where links lag others may still wait for what this one sends
        in rounds to come."""
        self._mark()
        for step in rounds:
            yield from self._round(step)
            self._mark()
        under_way.discard(self.seat.rank)
        step = rounds.stop
        while self.seat.lagging and under_way:
            yield from self._round(step)
            step += 1

    def _mark(self) -> None:
        sent = self.network.sent_bytes.get(self.seat.rank, 0)
        self.marks.append((self.clock.now, self.computing, self.handling, sent))

    def played(self, warm_up: int) -> Played:
        first, last = self.marks[warm_up], self.marks[-1]
        began, computing, handling, sent = first
        ends = [mark[0] for mark in self.marks[warm_up:]]
        return Played(
            began,
            last[0],
            tuple(b - a for a, b in itertools.pairwise(ends)),
            last[1] - computing,
            last[2] - handling,
            last[3] - sent,
            tuple(self.ages[warm_up:]),
        )

    # time -------------------------------------------------------------------------------------------------------------

    def compute(self, seconds: float, factor: float) -> Iterator[float]:
        self.computing += factor * seconds
        yield factor * seconds

    def handle(self, numbers: Mapping[str, int]) -> Iterator[float]:
        seconds = sum(count * cost(self.costs, what) for what, count in numbers.items())
        self.handling += seconds
        yield seconds

    # messages ---------------------------------------------------------------------------------------------------------

    def post(self, post: Post) -> Happening:
        if post.kind == "swap":
            return self.swap((post.members, post.tag), post.tells, post.hears)
        threads = self._threads.setdefault(post.members, Threads(self.clock, UNDER_WAY))
        number = self._counts[post.members] = self._counts.get(post.members, 0) + 1
        me, key = post.members.index(self.seat.rank), (post.members, number)
        if post.kind == "sum":
            return threads.give(
                all_reduce(self.network, post.members, me, key, post.nbytes, cost(self.costs, "pass") / 4)
            )
        play = all_gather if post.kind == "gather" else all_to_all
        return threads.give(play(self.network, post.members, me, key, post.nbytes))

    def swap(self, key: Key, tells: Mapping[int, int], hears: Mapping[int, int]) -> Happening:
        own = self.seat.rank
        under_way = [self.network.hear(rank, own, key) for rank in hears]
        under_way += [self.network.tell(own, rank, key, nbytes) for rank, nbytes in tells.items()]
        return self.clock.start(_all(under_way))

    # the round (game/turn.py) -----------------------------------------------------------------------------------------

    def _round(self, step: int) -> Process:
        factor = self.pace(self.seat.rank, step)
        parts = [part for beat in self.seat.beats for part in beat]
        first: dict[Name, Part] = {part.player: part for part in reversed(parts)}
        for player in reversed(first):
            yield from self.flats[player].begin(step)
        for beat in self.seat.beats:
            yield from self._beat(beat, step, factor)
        if self.mail:
            yield from self.mail.after(step)

    def _beat(self, beat: Sequence[Part], step: int, factor: float) -> Process:
        sums = list[Happening]()
        for part in beat:
            yield from self.flats[part.player].enter(step)
        for part in beat:
            sums += yield from self._turn(part, step, factor)
        for part in reversed(beat):
            yield from self.flats[part.player].receive()
        for part in beat:
            yield from self.flats[part.player].conclude()
            yield from self.compute(part.whole - part.backward, factor)
        yield from sums

    def _turn(self, part: Part, step: int, factor: float) -> Generator[float | Happening, None, list[Happening]]:
        """Forward and backward. Returns the sum of moments that is under way."""
        done, sums = 0.0, list[Happening]()
        if self.mail and part.player == "D":
            yield from self.mail.fakes(step)
        if self.mail and part.player == "G":
            yield from self.compute(part.made, factor)
            done = part.made
            yield from self.mail.critic(step)
        if part.moments:
            yield from self.compute(part.forward - done, factor)
            done = part.forward
            sums.append(self.post(Post(0, "sum", part.team, nbytes=part.moments)))
        for bucket, at in enumerate(part.filled):
            yield from self.compute(max(0.0, at - done), factor)
            done = max(at, done)
            yield from self.flats[part.player].filled(bucket)
        yield from self.compute(part.backward - done, factor)
        return sums


class Flat:
    """One player's exchanges (comm/flat.py)."""

    def __init__(self, rank: Rank, player: Name, buckets: int):
        self.rank = rank
        self.player: Name = player
        lagging = rank.seat.lagging.get(player)
        self.late = [Late(rank, lagging, i) for i in range(buckets)] if lagging else None
        self._running: list[Exchanging] = []
        self._awaited: list[Moment | Happening | None] = []

    def begin(self, step: int) -> Process:
        if self.late:
            self._running = [late.exchange(step) for late in self.late]
        else:
            self._running = [self._exchange(script) for script in self.rank.seat.script(self.player, step)]
        self._awaited = [None] * len(self._running)
        for i in range(len(self._running)):
            yield from self._next(i)

    def _exchange(self, script: Script) -> Exchanging:
        works: dict[int, Happening] = {}
        for act in script:
            if isinstance(act, Handle):
                yield from self.rank.handle(act.numbers)
            elif isinstance(act, Post):
                works[act.number] = self.rank.post(act)
            elif isinstance(act, Until):
                yield Yielded(act.moment)
            elif isinstance(act, Wait):
                yield works[act.number] if act.here else Yielded(works[act.number])

    def _next(self, i: int) -> Process:
        """Until it waits for something, or has ended."""
        for awaited in self._running[i]:
            if isinstance(awaited, Yielded):
                self._awaited[i] = awaited.awaited
                return
            yield awaited
        self._awaited[i] = None

    def _past(self, i: int, moment: Moment) -> Process:
        while self._awaited[i] is moment:
            yield from self._next(i)

    def enter(self, step: int) -> Process:
        if not self._running:
            yield from self.begin(step)
        for i in range(len(self._running)):
            yield from self._past(i, TURN)

    def filled(self, i: int) -> Process:
        yield from self._past(i, GRADIENT)

    def receive(self) -> Process:
        under_way = deque(range(len(self._running)))
        while under_way:
            i = under_way.popleft()
            awaited = self._awaited[i]
            if awaited is None or awaited is ARRIVED:
                continue
            if isinstance(awaited, Happening):
                yield awaited
            yield from self._next(i)
            under_way.append(i)

    def conclude(self) -> Process:
        for i in range(len(self._running)):
            while self._awaited[i] is not None:
                yield from self._next(i)
        self._running = []


class Late:
    """One bucket's swaps with neighbours that may lag (comm/late.py)."""

    def __init__(self, rank: Rank, lagging: Lagging, bucket: int):
        self.rank, self.lagging, self.bucket = rank, lagging, bucket
        self._swaps: dict[int, tuple[int, Happening]] = {}  # when begun, and whether it is over

    def exchange(self, step: int) -> Exchanging:
        if (step + 1) % self.lagging.every:
            return
        n, age = self.lagging.sizes[self.bucket], step // self.lagging.every
        for j in self.lagging.neighbours:
            if j not in self._swaps:
                yield from self.rank.handle({"pass": n})
                key = (tuple(sorted((j, self.rank.seat.rank))), self.lagging.tag + self.bucket)
                self._swaps[j] = age, self.rank.swap(key, {j: 4 * n}, {j: 4 * n})
        for j in self.lagging.neighbours:
            begun, over = self._swaps[j]
            if age - begun >= self.lagging.late:
                yield Yielded(over)
        yield Yielded(ARRIVED)
        for j in self.lagging.neighbours:
            begun, over = self._swaps[j]
            if over.happened:
                del self._swaps[j]
                self.rank.ages.append(age - begun)
                yield from self.rank.handle({"pass": 2 * n})


class Mail:
    """What the other team posts (game/posted.py)."""

    def __init__(self, rank: Rank, posts: Posts):
        self.rank, self.posts = rank, posts
        self._inboxes = {(sender, what): Inbox(rank, sender, what) for sender, what in self._senders()}
        self._version: int | None = None
        self._newer = 0
        self._images = -1
        self._lag_of = -1

    def _senders(self) -> list[tuple[int, str]]:
        images = [(sender, "images") for sender in self.posts.images_from]
        return images + [(sender, "snapshots") for sender in self.posts.snapshots_from]

    def fakes(self, step: int) -> Process:
        """D's turn begins: the newest images that all of the team have."""
        if step == self._lag_of:
            return
        self._lag_of = step
        needed = step - self.posts.lead + 1 if self._images >= 0 else step
        newest = list[int]()
        for inbox in self._inboxes.values():
            yield from inbox.receive(step, needed)
            newest.append(min(step, inbox.newest))
        yield from self._agree()
        self._images = min(newest)
        self.rank.ages.append(step - self._images)

    def critic(self, step: int) -> Process:
        """G has made its images: they leave; then the newest D that all of the team have."""
        for rank, nbytes in self.posts.images_to.items():
            self.rank.network.tell(self.rank.seat.rank, rank, self._key(rank, "images"), nbytes)
        for inbox in self._inboxes.values():
            yield from inbox.receive(step, step - self.posts.lead)
            self._newer = (inbox.newest + 1) // self.posts.every * self.posts.every
        if self._version is None:
            self._version = step
        newer = max(self._version, min(self._newer, step))
        yield from self._agree()
        if newer > self._version:
            yield from self.rank.handle(self.posts.shown)
            self._version = newer
        self.rank.ages.append(step - self._version)

    def _agree(self) -> Process:
        if len(self.posts.team) > 1:
            yield self.rank.post(Post(0, "gather", self.posts.team, nbytes=WORD))

    def after(self, step: int) -> Process:
        """D has moved: its snapshot leaves, where one is due, or a word that none is."""
        due = (step + 1) % self.posts.every == 0
        if self.posts.snapshots_to and due:
            yield from self.rank.handle(self.posts.packed)
        for rank in self.posts.snapshots_to:
            nbytes = self.posts.snapshot if due else 1
            self.rank.network.tell(self.rank.seat.rank, rank, self._key(rank, "snapshots"), nbytes)

    def _key(self, other: int, what: str) -> Key:
        return tuple(sorted((other, self.rank.seat.rank))), what


class Inbox:
    """Numbered messages of another rank (comm/mail.py)."""

    def __init__(self, rank: Rank, sender: int, what: str):
        self.rank, self.sender = rank, sender
        self.key = tuple(sorted((sender, rank.seat.rank))), what
        self.newest = -1
        self._asked = deque[tuple[int, Happening]]()
        self._next: int | None = None

    def receive(self, until: int, needed: int) -> Process:
        first = until if self._next is None else self._next
        for number in range(first, until + 1):
            self._asked.append((number, self.rank.network.hear(self.sender, self.rank.seat.rank, self.key)))
        self._next = max(first, until + 1)
        while self._asked and (self._asked[0][0] <= needed or self._asked[0][1].happened):
            number, here = self._asked.popleft()
            yield here
            self.newest = number


def _all(happenings: Sequence[Happening]) -> Process:
    yield from happenings


def cost(costs: Mapping[str, float], what: str) -> float:
    """Seconds for a number: of this wire, or of any."""
    return costs.get(what, costs.get(what.rpartition("/")[2], 0.0))
