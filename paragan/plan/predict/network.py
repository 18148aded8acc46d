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
from paragan.plan.predict.event_loop import Process, SimClock, SimEvent

CONNECTION_WINDOW_BYTES, CHUNK_BYTES = 512 << 10, 256 << 10  # bytes
REQUEST_BYTES = 100  # bytes of gloo's notification with its headers
MAX_SEGMENT_BYTES = 1 << 20  # bytes: the largest of a ring (gloo)
MAX_SEGMENTS = 256  # segments that a rank passes on one by one in a collective; of more, some are taken together
MAX_IN_FLIGHT = 2  # segments of one collective; and collectives of one group (torch)


MessageKey = tuple[Hashable, ...]


def _no_op() -> None:
    pass


@dataclass
class Connection:
    """A connection, one way: pieces that wait, with what is done when they have arrived, and bytes in the port."""

    slow_start: SlowStart
    queue: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque[tuple[int, Callable[[], None]]])
    port_bytes: int = 0


@dataclass(frozen=True)
class _Route:
    """From one host to another. latency: s; pace: bytes a second of this pair alone (inf: the ports')."""

    latency_s: float
    rate: float


class Network:
    """Ports, and what waits for them."""

    def __init__(
        self, clock: SimClock, links: Links, ranks: int, symmetric: bool = False, max_segments: int = MAX_SEGMENTS
    ):
        self.clock, self.links, self.ranks, self.symmetric = clock, links, ranks, symmetric
        self.ranks_per_host, self.max_segments = min(ranks, links.ranks_per_host), max_segments
        hosts = -(-ranks // self.ranks_per_host)
        played = range(1 if symmetric else hosts)
        left = (links.duplex_efficiency if hosts > 1 else 1.0) * (links.contention_efficiency if hosts > 2 else 1.0)
        ports = [links.port_rates(host) for host in played]
        self.up_rates, self.down_rates = [left * up for up, _ in ports], [left * down for _, down in ports]
        self._up_free_s, self._down_free_s = [0.0] * len(played), [0.0] * len(played)
        self._pair_free_s: dict[tuple[int, int], float] = {}
        self._routes: dict[tuple[int, int], _Route] = {}
        self._rate_factor = left
        self._pending_requests: dict[Hashable, int] = {}
        self._pending_sends: dict[Hashable, deque[tuple[int, SimEvent]]] = {}
        self._pending_recvs: dict[Hashable, deque[SimEvent]] = {}
        self._connections: dict[Hashable, Connection] = {}
        self.sent_bytes: dict[int, int] = {}

    def send(self, source: int, target: int, key: MessageKey, nbytes: int) -> SimEvent:
        """From rank a to rank b, when b has asked for it. Happens when it has been handed on. The first word of a key
        names the connection."""
        entry, left = self._message_key(source, target, key), SimEvent()
        self.sent_bytes[source] = self.sent_bytes.get(source, 0) + nbytes
        if self._pending_requests.get(entry):
            self._pending_requests[entry] -= 1
            self._start_transfer(source, target, key, entry, nbytes, left)
        else:
            self._pending_sends.setdefault(entry, deque()).append((nbytes, left))
        return left

    def recv(self, source: int, target: int, key: MessageKey) -> SimEvent:
        """Rank b asks for what a tells it. Happens when all of it is there."""
        entry, here = self._message_key(source, target, key), SimEvent()
        self._pending_recvs.setdefault(entry, deque()).append(here)
        self._enqueue(target, source, key, REQUEST_BYTES, lambda: self._on_request(source, target, key, entry))
        return here

    def latency_between(self, a: int, b: int) -> float:
        """Between two ranks."""
        return self._route(a // self.ranks_per_host, b // self.ranks_per_host).latency_s

    def _message_key(self, a: int, b: int, key: Hashable) -> Hashable:
        if self.symmetric:  # as the receiver on the first host knows it
            shift = b // self.ranks_per_host * self.ranks_per_host
            a, b = (a - shift) % self.ranks, b - shift
        return a, b, key

    def _on_request(self, a: int, b: int, key: MessageKey, message_key: Hashable) -> None:
        waiting = self._pending_sends.get(message_key)
        if waiting:
            self._start_transfer(a, b, key, message_key, *waiting.popleft())
        else:
            self._pending_requests[message_key] = self._pending_requests.get(message_key, 0) + 1

    def _start_transfer(
        self, a: int, b: int, key: MessageKey, message_key: Hashable, nbytes: int, sent: SimEvent
    ) -> None:
        here = self._pending_recvs[message_key].popleft()
        sent.trigger()
        self._enqueue(a, b, key, nbytes, here.trigger)

    def _enqueue(self, a: int, b: int, key: MessageKey, nbytes: int, done: Callable[[], None]) -> None:
        """Behind what leaves by the same connection."""
        line = self._connection(a, b, key[0])
        while nbytes > CHUNK_BYTES:
            line.queue.append((CHUNK_BYTES, _no_op))
            nbytes -= CHUNK_BYTES
        line.queue.append((nbytes, done))
        self._fill_port(a, b, line)

    def _fill_port(self, a: int, b: int, connection: Connection) -> None:
        """What the window has room for enters the port."""
        while connection.queue and (
            not connection.port_bytes or connection.port_bytes + connection.queue[0][0] <= CONNECTION_WINDOW_BYTES
        ):
            room = connection.slow_start.available_bytes(self.clock.now_s)
            if room < min(1, connection.queue[0][0]):  # room for nothing
                return
            nbytes, done = connection.queue.popleft()
            if nbytes > room:
                connection.queue.appendleft((nbytes - int(room), done))
                nbytes, done = int(room), _no_op
            connection.port_bytes += nbytes
            if room < math.inf:
                connection.slow_start.on_send(nbytes, self.clock.now_s)
                done = self._with_ack(a, b, connection, nbytes, done)
            leaves = self._transmit(a, b, nbytes, done)
            self.clock.schedule(leaves, lambda nbytes=nbytes: self._on_port_exit(a, b, connection, nbytes))

    def _with_ack(
        self, a: int, b: int, connection: Connection, nbytes: int, done: Callable[[], None]
    ) -> Callable[[], None]:
        """What is done on arrival, and makes room a latency later."""

        def on_ack() -> None:
            connection.slow_start.on_ack(nbytes)
            self._fill_port(a, b, connection)

        def on_arrival() -> None:
            done()
            self.clock.schedule(self.clock.now_s + self.latency_between(a, b), on_ack)

        return on_arrival

    def _connection(self, a: int, b: int, connection: Hashable) -> Connection:
        """Made when it is first used."""
        entry = self._message_key(a, b, connection)
        if entry not in self._connections:
            self._connections[entry] = Connection(
                self._make_slow_start(a // self.ranks_per_host, b // self.ranks_per_host)
            )
        return self._connections[entry]

    def _make_slow_start(self, one: int, other: int) -> SlowStart:
        way, first = self._route(one, other), self.links.initial_window_bytes if one != other else None
        pace = min(way.rate, self.links.port_rates(one)[0], self.links.port_rates(other)[1])
        return SlowStart(first or math.inf, CONNECTION_WINDOW_BYTES + 2 * way.latency_s * pace, 2 * way.latency_s)

    def _on_port_exit(self, a: int, b: int, connection: Connection, nbytes: int) -> None:
        connection.port_bytes -= nbytes
        self._fill_port(a, b, connection)

    def _transmit(self, a: int, b: int, nbytes: int, done: Callable[[], None]) -> float:
        """Through both ports; returns when it will have left the first."""
        one, other = a // self.ranks_per_host, b // self.ranks_per_host
        way = self._route(one, other)
        if one == other:
            return self._transmit_intra_host(a, b, nbytes, way, done)
        one, other = (0, 0) if self.symmetric else (one, other)
        start = max(self.clock.now_s, self._up_free_s[one])
        leaves = self._up_free_s[one] = start + nbytes / self.up_rates[one]
        if way.rate < math.inf:
            paced = max(start, self._pair_free_s.get((one, other), 0.0)) + nbytes / way.rate
            leaves = self._pair_free_s[one, other] = max(leaves, paced)

        def on_arrival() -> None:
            begins = max(self.clock.now_s, self._down_free_s[other])
            self._down_free_s[other] = begins + nbytes / self.down_rates[other]
            self.clock.schedule(max(self._down_free_s[other], leaves + way.latency_s), done)

        self.clock.schedule(start + way.latency_s, on_arrival)
        return leaves

    def _transmit_intra_host(self, a: int, b: int, nbytes: int, route: _Route, done: Callable[[], None]) -> float:
        """Between ranks of one host, at their own pace."""
        pair = (-1 - a, -1 - b)
        leaves = max(self.clock.now_s, self._pair_free_s.get(pair, 0.0)) + nbytes / route.rate
        self._pair_free_s[pair] = leaves
        self.clock.schedule(leaves + route.latency_s, done)
        return leaves

    def _route(self, one: int, other: int) -> _Route:
        if (one, other) not in self._routes:
            link = self.links.link_between(one, other)
            ports = min(self.links.port_rates(one)[0], self.links.port_rates(other)[1])
            slower = one == other or link.bandwidth < ports
            self._routes[one, other] = _Route(
                link.latency, (self._rate_factor * link.bandwidth) if slower else math.inf
            )
        return self._routes[one, other]


# collectives ----------------------------------------------------------------------------------------------------------


def all_reduce(
    network: Network, ranks: Sequence[int], index: int, key: MessageKey, nbytes: int, reduce_s_per_byte: float
) -> Process:
    """A ring sum as rank `ranks[me]` plays it. byte_s: seconds to add a byte to another."""
    size = len(ranks)
    segment = _round_up(min(-(-nbytes // (2 * size)), MAX_SEGMENT_BYTES), 4)
    count = _round_up(max(-(-nbytes // segment), 2 * size), size)

    def segment_lengths(first: int) -> list[int]:
        """Of the segments from this chunk on, as they lie; nothing beyond the end."""
        starts = ((first * (count // size) + i) % count * segment for i in range(count - count // size))
        return [max(0, min(segment, nbytes - start)) for start in starts]

    there, back = ranks[index - 1], ranks[(index + 1) % size]
    yield from _ring_pass(
        network,
        (back, ranks[index], there),
        (*key, "sum"),
        segment_lengths(index + 1),
        segment_lengths(index + 2),
        reduce_s_per_byte,
    )
    yield from _ring_pass(
        network, (back, ranks[index], there), (*key, "mean"), segment_lengths(index), segment_lengths(index + 1), 0.0
    )


def all_gather(network: Network, ranks: Sequence[int], index: int, key: MessageKey, nbytes: int) -> Process:
    """Everyone's `nbytes` to everyone, as rank `ranks[me]` plays it."""
    size = len(ranks)
    halves = [nbytes // 2, nbytes - nbytes // 2] * (size - 1)
    yield from _ring_pass(
        network, (ranks[index - 1], ranks[index], ranks[(index + 1) % size]), key, halves, halves, 0.0
    )


def all_to_all(network: Network, ranks: Sequence[int], index: int, key: MessageKey, nbytes: int) -> Process:
    """An equal part of `nbytes` to everyone else, as rank `ranks[me]` plays it."""
    size, own = len(ranks), ranks[index]
    under_way: list[SimEvent] = []
    for i in range(1, size):
        under_way.append(network.send(own, ranks[(index + i) % size], key, nbytes // size))
        under_way.append(network.recv(ranks[index - i], own, key))
    yield from under_way


def _ring_pass(
    network: Network,
    ranks: tuple[int, int, int],
    key: MessageKey,
    send_lengths: Sequence[int],
    recv_lengths: Sequence[int],
    reduce_s_per_byte: float,
) -> Process:
    """Segments to the next from the one before, two under way; none of no length. ranks: the one before, this one, the
    next. Folded, what it tells stands for what it hears: it asks for as many."""
    before, own, after = ranks
    together = -(-len(send_lengths) // network.max_segments)
    send_lengths, recv_lengths, late = (
        _merge_segments(send_lengths, together),
        _merge_segments(recv_lengths, together),
        0.0,
    )
    if together > 1:  # of each, all but one wait for a question and an answer
        late = 2 * (together - 1) / MAX_IN_FLIGHT * network.latency_between(before, own)
    asked = send_lengths if network.symmetric else recv_lengths
    tells, hears = list[SimEvent | None](), list[SimEvent | None]()
    for i in range(len(send_lengths) + MAX_IN_FLIGHT):
        if i >= MAX_IN_FLIGHT:
            here, left = hears[i - MAX_IN_FLIGHT], tells[i - MAX_IN_FLIGHT]
            if here:
                yield here
                yield recv_lengths[i - MAX_IN_FLIGHT] * reduce_s_per_byte + late
            if left:
                yield left
        if i < len(send_lengths):
            hears.append(network.recv(before, own, key) if asked[i] else None)
            tells.append(network.send(own, after, key, send_lengths[i]) if send_lengths[i] else None)


def _merge_segments(lengths: Sequence[int], merged: int) -> Sequence[int]:
    return [sum(lengths[i : i + merged]) for i in range(0, len(lengths), merged)]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


IDLE_TIMEOUT_S = 0.2  # seconds beyond a round trip


class SlowStart:
    """Of one connection, one way. first, most: bytes; inf is a connection that is open at once."""

    def __init__(self, initial_bytes: float, max_bytes: float, round_trip_s: float):
        self.initial_bytes, self.max_bytes, self.round_trip_s = (
            initial_bytes,
            max(initial_bytes, max_bytes),
            round_trip_s,
        )
        self._window_bytes, self._in_flight_bytes, self._last_send_s = initial_bytes, 0, 0.0

    def available_bytes(self, now_s: float) -> float:
        """Bytes that may leave."""
        rests = math.floor((now_s - self._last_send_s) / (self.round_trip_s + IDLE_TIMEOUT_S))
        if rests and not self._in_flight_bytes and self._window_bytes > self.initial_bytes:
            self._window_bytes, self._last_send_s = (
                max(self.initial_bytes, self._window_bytes / 2 ** min(rests, 60)),
                now_s,
            )
        return self._window_bytes - self._in_flight_bytes

    def on_send(self, nbytes: int, now_s: float) -> None:
        self._in_flight_bytes, self._last_send_s = self._in_flight_bytes + nbytes, now_s

    def on_ack(self, nbytes: int) -> None:
        self._in_flight_bytes -= nbytes
        self._window_bytes = min(self.max_bytes, self._window_bytes + nbytes)
