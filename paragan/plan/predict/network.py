"""Messages between ranks as gloo sends them over TCP, in counted time.

A message leaves when its receiver has asked for it, and the question has travelled (a rendezvous: gloo's unbound
buffers), behind what leaves by the same connection. It goes through the sender's port, after a latency through the
receiver's, each first come first served. A connection has at most WINDOW bytes in a port, in pieces, so that long
messages share it; where `links.window` says with how many bytes it begins, it opens as TCP does (slow_start.py).
Collectives are gloo's (as in torch 2.13): a sum goes round a ring, to the rank before, in segments of which two are
under way; a gather to the rank after, in halves; a transposition to all at once.

    clock = Clock(); network = Network(clock, links, ranks)
    network.tell(0, 1, ("group", 1), 1000); heard = network.hear(0, 1, ("group", 1))
    clock.run()

`folded`: all hosts do the same at the same time (as in a ring of equals), so only the first is played: what it sends to
others stands for what it hears from others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from paragan.plan.links import Links
from paragan.plan.predict.event_loop import Clock, Happening, Process

WINDOW, PIECE = 512 << 10, 256 << 10  # bytes
QUESTION = 100  # bytes of gloo's notification with its headers
SEGMENT = 1 << 20  # bytes: the largest of a ring (gloo)
MOST = 256  # segments that a rank passes on one by one in a collective; of more, some are taken together
UNDER_WAY = 2  # segments of one collective; and collectives of one group (torch)


Key = tuple[Hashable, ...]


def _nothing() -> None:
    pass


@dataclass
class Line:
    """A connection, one way: pieces that wait, with what is done when they have arrived, and bytes in the port."""

    opening: Opening
    waiting: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque[tuple[int, Callable[[], None]]])
    there: int = 0


@dataclass(frozen=True)
class _Way:
    """From one host to another. latency: s; pace: bytes a second of this pair alone (inf: the ports')."""

    latency: float
    pace: float


class Network:
    """Ports, and what waits for them."""

    def __init__(self, clock: Clock, links: Links, ranks: int, folded: bool = False, most: int = MOST):
        self.clock, self.links, self.ranks, self.folded = clock, links, ranks, folded
        self.each, self.most = min(ranks, links.ranks_per_host), most
        hosts = -(-ranks // self.each)
        played = range(1 if folded else hosts)
        left = (links.both_ways if hosts > 1 else 1.0) * (links.contention if hosts > 2 else 1.0)
        ports = [links.port(host) for host in played]
        self.up, self.down = [left * up for up, _ in ports], [left * down for _, down in ports]
        self._up_free, self._down_free = [0.0] * len(played), [0.0] * len(played)
        self._pace_free: dict[tuple[int, int], float] = {}
        self._ways: dict[tuple[int, int], _Way] = {}
        self._left = left
        self._asked: dict[Hashable, int] = {}
        self._told: dict[Hashable, deque[tuple[int, Happening]]] = {}
        self._heard: dict[Hashable, deque[Happening]] = {}
        self._lines: dict[Hashable, Line] = {}
        self.sent_bytes: dict[int, int] = {}

    def tell(self, a: int, b: int, key: Key, nbytes: int) -> Happening:
        """From rank a to rank b, when b has asked for it. Happens when it has been handed on. The first word of a key
        names the connection."""
        entry, left = self._entry(a, b, key), Happening()
        self.sent_bytes[a] = self.sent_bytes.get(a, 0) + nbytes
        if self._asked.get(entry):
            self._asked[entry] -= 1
            self._leave(a, b, key, entry, nbytes, left)
        else:
            self._told.setdefault(entry, deque()).append((nbytes, left))
        return left

    def hear(self, a: int, b: int, key: Key) -> Happening:
        """Rank b asks for what a tells it. Happens when all of it is there."""
        entry, here = self._entry(a, b, key), Happening()
        self._heard.setdefault(entry, deque()).append(here)
        self._queue(b, a, key, QUESTION, lambda: self._asks(a, b, key, entry))
        return here

    def latency(self, a: int, b: int) -> float:
        """Between two ranks."""
        return self._way(a // self.each, b // self.each).latency

    def _entry(self, a: int, b: int, key: Hashable) -> Hashable:
        if self.folded:  # as the receiver on the first host knows it
            shift = b // self.each * self.each
            a, b = (a - shift) % self.ranks, b - shift
        return a, b, key

    def _asks(self, a: int, b: int, key: Key, entry: Hashable) -> None:
        waiting = self._told.get(entry)
        if waiting:
            self._leave(a, b, key, entry, *waiting.popleft())
        else:
            self._asked[entry] = self._asked.get(entry, 0) + 1

    def _leave(self, a: int, b: int, key: Key, entry: Hashable, nbytes: int, left: Happening) -> None:
        here = self._heard[entry].popleft()
        left.happen()
        self._queue(a, b, key, nbytes, here.happen)

    def _queue(self, a: int, b: int, key: Key, nbytes: int, done: Callable[[], None]) -> None:
        """Behind what leaves by the same connection."""
        line = self._line(a, b, key[0])
        while nbytes > PIECE:
            line.waiting.append((PIECE, _nothing))
            nbytes -= PIECE
        line.waiting.append((nbytes, done))
        self._fill(a, b, line)

    def _fill(self, a: int, b: int, line: Line) -> None:
        """What the window has room for enters the port."""
        while line.waiting and (not line.there or line.there + line.waiting[0][0] <= WINDOW):
            room = line.opening.room(self.clock.now)
            if room < min(1, line.waiting[0][0]):  # room for nothing
                return
            nbytes, done = line.waiting.popleft()
            if nbytes > room:
                line.waiting.appendleft((nbytes - int(room), done))
                nbytes, done = int(room), _nothing
            line.there += nbytes
            if room < math.inf:
                line.opening.leaves(nbytes, self.clock.now)
                done = self._answering(a, b, line, nbytes, done)
            leaves = self._put(a, b, nbytes, done)
            self.clock.at(leaves, lambda nbytes=nbytes: self._left_port(a, b, line, nbytes))

    def _answering(self, a: int, b: int, line: Line, nbytes: int, done: Callable[[], None]) -> Callable[[], None]:
        """What is done on arrival, and makes room a latency later."""

        def answered() -> None:
            line.opening.answered(nbytes)
            self._fill(a, b, line)

        def arrived() -> None:
            done()
            self.clock.at(self.clock.now + self.latency(a, b), answered)

        return arrived

    def _line(self, a: int, b: int, connection: Hashable) -> Line:
        """Made when it is first used."""
        entry = self._entry(a, b, connection)
        if entry not in self._lines:
            self._lines[entry] = Line(self._opening(a // self.each, b // self.each))
        return self._lines[entry]

    def _opening(self, one: int, other: int) -> Opening:
        way, first = self._way(one, other), self.links.window if one != other else None
        pace = min(way.pace, self.links.port(one)[0], self.links.port(other)[1])
        return Opening(first or math.inf, WINDOW + 2 * way.latency * pace, 2 * way.latency)

    def _left_port(self, a: int, b: int, line: Line, nbytes: int) -> None:
        line.there -= nbytes
        self._fill(a, b, line)

    def _put(self, a: int, b: int, nbytes: int, done: Callable[[], None]) -> float:
        """Through both ports; returns when it will have left the first."""
        one, other = a // self.each, b // self.each
        way = self._way(one, other)
        if one == other:
            return self._within(a, b, nbytes, way, done)
        one, other = (0, 0) if self.folded else (one, other)
        start = max(self.clock.now, self._up_free[one])
        leaves = self._up_free[one] = start + nbytes / self.up[one]
        if way.pace < math.inf:
            paced = max(start, self._pace_free.get((one, other), 0.0)) + nbytes / way.pace
            leaves = self._pace_free[one, other] = max(leaves, paced)

        def comes() -> None:
            begins = max(self.clock.now, self._down_free[other])
            self._down_free[other] = begins + nbytes / self.down[other]
            self.clock.at(max(self._down_free[other], leaves + way.latency), done)

        self.clock.at(start + way.latency, comes)
        return leaves

    def _within(self, a: int, b: int, nbytes: int, way: _Way, done: Callable[[], None]) -> float:
        """Between ranks of one host, at their own pace."""
        pair = (-1 - a, -1 - b)
        leaves = max(self.clock.now, self._pace_free.get(pair, 0.0)) + nbytes / way.pace
        self._pace_free[pair] = leaves
        self.clock.at(leaves + way.latency, done)
        return leaves

    def _way(self, one: int, other: int) -> _Way:
        if (one, other) not in self._ways:
            link = self.links.between(one, other)
            ports = min(self.links.port(one)[0], self.links.port(other)[1])
            slower = one == other or link.bandwidth < ports
            self._ways[one, other] = _Way(link.latency, (self._left * link.bandwidth) if slower else math.inf)
        return self._ways[one, other]


# collectives ----------------------------------------------------------------------------------------------------------


def all_reduce(network: Network, ranks: Sequence[int], me: int, key: Key, nbytes: int, byte_s: float) -> Process:
    """A ring sum as rank `ranks[me]` plays it. byte_s: seconds to add a byte to another."""
    size = len(ranks)
    segment = _up(min(-(-nbytes // (2 * size)), SEGMENT), 4)
    count = _up(max(-(-nbytes // segment), 2 * size), size)

    def lengths(first: int) -> list[int]:
        """Of the segments from this chunk on, as they lie; nothing beyond the end."""
        starts = ((first * (count // size) + i) % count * segment for i in range(count - count // size))
        return [max(0, min(segment, nbytes - start)) for start in starts]

    there, back = ranks[me - 1], ranks[(me + 1) % size]
    yield from _ring(network, (back, ranks[me], there), (*key, "sum"), lengths(me + 1), lengths(me + 2), byte_s)
    yield from _ring(network, (back, ranks[me], there), (*key, "mean"), lengths(me), lengths(me + 1), 0.0)


def all_gather(network: Network, ranks: Sequence[int], me: int, key: Key, nbytes: int) -> Process:
    """Everyone's `nbytes` to everyone, as rank `ranks[me]` plays it."""
    size = len(ranks)
    halves = [nbytes // 2, nbytes - nbytes // 2] * (size - 1)
    yield from _ring(network, (ranks[me - 1], ranks[me], ranks[(me + 1) % size]), key, halves, halves, 0.0)


def all_to_all(network: Network, ranks: Sequence[int], me: int, key: Key, nbytes: int) -> Process:
    """An equal part of `nbytes` to everyone else, as rank `ranks[me]` plays it."""
    size, own = len(ranks), ranks[me]
    under_way: list[Happening] = []
    for i in range(1, size):
        under_way.append(network.tell(own, ranks[(me + i) % size], key, nbytes // size))
        under_way.append(network.hear(ranks[me - i], own, key))
    yield from under_way


def _ring(
    network: Network,
    ranks: tuple[int, int, int],
    key: Key,
    told: Sequence[int],
    heard: Sequence[int],
    byte_s: float,
) -> Process:
    """Segments to the next from the one before, two under way; none of no length. ranks: the one before, this one, the
    next. Folded, what it tells stands for what it hears: it asks for as many."""
    before, own, after = ranks
    together = -(-len(told) // network.most)
    told, heard, late = _joined(told, together), _joined(heard, together), 0.0
    if together > 1:  # of each, all but one wait for a question and an answer
        late = 2 * (together - 1) / UNDER_WAY * network.latency(before, own)
    asked = told if network.folded else heard
    tells, hears = list[Happening | None](), list[Happening | None]()
    for i in range(len(told) + UNDER_WAY):
        if i >= UNDER_WAY:
            here, left = hears[i - UNDER_WAY], tells[i - UNDER_WAY]
            if here:
                yield here
                yield heard[i - UNDER_WAY] * byte_s + late
            if left:
                yield left
        if i < len(told):
            hears.append(network.hear(before, own, key) if asked[i] else None)
            tells.append(network.tell(own, after, key, told[i]) if told[i] else None)


def _joined(lengths: Sequence[int], together: int) -> Sequence[int]:
    return [sum(lengths[i : i + together]) for i in range(0, len(lengths), together)]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


TIMEOUT = 0.2  # seconds beyond a round trip


class Opening:
    """Of one connection, one way. first, most: bytes; inf is a connection that is open at once."""

    def __init__(self, first: float, most: float, round_trip: float):
        self.first, self.most, self.round_trip = first, max(first, most), round_trip
        self._open, self._under_way, self._last = first, 0, 0.0

    def room(self, now: float) -> float:
        """Bytes that may leave."""
        rests = math.floor((now - self._last) / (self.round_trip + TIMEOUT))
        if rests and not self._under_way and self._open > self.first:
            self._open, self._last = max(self.first, self._open / 2 ** min(rests, 60)), now
        return self._open - self._under_way

    def leaves(self, nbytes: int, now: float) -> None:
        self._under_way, self._last = self._under_way + nbytes, now

    def answered(self, nbytes: int) -> None:
        self._under_way -= nbytes
        self._open = min(self.most, self._open + nbytes)
