"""Simulate messages between ranks as gloo sends them over TCP.

A message is sent when its receiver has requested it and the request has arrived (gloo's unbound buffers are a
rendezvous), after earlier messages of the same connection. It passes through the sender's port and, after a latency,
through the receiver's. Each port serves first come first served. A connection has at most CONNECTION_WINDOW_BYTES in a
port, in chunks, so long messages share the port. If `links.initial_window_bytes` is set, a connection opens as TCP does
(`SlowStart`).

Collectives are those of gloo (torch 2.13). all_reduce: a ring, towards the rank before, in segments of which two are in
flight. all_gather: a ring, towards the rank after, in halves. all_to_all: to all ranks at once.

    clock = SimClock()
    network = Network(clock, links, ranks)
    network.send(0, 1, ("group", 1), 1000)
    received = network.recv(0, 1, ("group", 1))
    clock.run()

With `symmetric`, all hosts do the same at the same time (as in a ring of equal hosts). Only the first one is simulated,
and what it sends to others stands for what it receives from others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from paragan.plan.links import Links
from paragan.plan.predict.event_loop import Process, SimClock, SimEvent

CONNECTION_WINDOW_BYTES = 512 << 10
CHUNK_BYTES = 256 << 10
REQUEST_BYTES = 100  # gloo's notification with its headers
MAX_SEGMENT_BYTES = 1 << 20  # of a ring (gloo)
MAX_SEGMENTS = 256  # simulated segments of a collective; beyond, several are merged into one
MAX_IN_FLIGHT = 2  # segments of one collective (gloo), and collectives of one group (torch)
IDLE_TIMEOUT_S = 0.2  # beyond a round trip; after it, the window of an idle connection is halved

MessageKey = tuple[Hashable, ...]


class MessageMismatch(RuntimeError):
    """Ranks do not agree on what they send each other."""


def _no_op() -> None:
    pass


@dataclass
class Connection:
    """One direction of a connection: queued chunks, each with the action on its arrival, and its bytes in the port."""

    slow_start: SlowStart
    queue: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque[tuple[int, Callable[[], None]]])
    port_bytes: int = 0


@dataclass(frozen=True)
class _Route:
    """From one host to another."""

    latency_s: float
    rate: float  # bytes per second of this pair; infinity if only the ports limit it


class Network:
    """The ports of all hosts, and the messages that wait for them."""

    def __init__(
        self, clock: SimClock, links: Links, ranks: int, symmetric: bool = False, max_segments: int = MAX_SEGMENTS
    ):
        self.clock = clock
        self.links = links
        self.ranks = ranks
        self.symmetric = symmetric
        self.ranks_per_host = min(ranks, links.ranks_per_host)
        self.max_segments = max_segments
        hosts = -(-ranks // self.ranks_per_host)
        num_simulated = 1 if symmetric else hosts
        duplex = links.duplex_efficiency if hosts > 1 else 1.0
        contention = links.contention_efficiency if hosts > 2 else 1.0
        self._rate_factor = duplex * contention
        ports = [links.port_rates(host) for host in range(num_simulated)]
        self.up_rates = [self._rate_factor * up for up, _ in ports]
        self.down_rates = [self._rate_factor * down for _, down in ports]
        self._up_free_s = [0.0] * num_simulated
        self._down_free_s = [0.0] * num_simulated
        self._pair_free_s: dict[tuple[int, int], float] = {}
        self._routes: dict[tuple[int, int], _Route] = {}
        self._pending_requests: dict[Hashable, int] = {}
        self._pending_sends: dict[Hashable, deque[tuple[int, SimEvent]]] = {}
        self._pending_recvs: dict[Hashable, deque[tuple[int | None, SimEvent]]] = {}
        self._connections: dict[Hashable, Connection] = {}
        self.sent_bytes: dict[int, int] = {}

    def send(self, source: int, target: int, key: MessageKey, nbytes: int) -> SimEvent:
        """Send a message between two ranks, as soon as the target has requested it.

        The first word of `key` names the connection. The returned event is triggered when the message leaves.
        """
        entry = self._message_key(source, target, key)
        sent = SimEvent()
        self.sent_bytes[source] = self.sent_bytes.get(source, 0) + nbytes
        if self._pending_requests.get(entry):
            self._pending_requests[entry] -= 1
            self._start_transfer(source, target, key, entry, nbytes, sent)
        else:
            self._pending_sends.setdefault(entry, deque()).append((nbytes, sent))
        return sent

    def recv(self, source: int, target: int, key: MessageKey, nbytes: int | None = None) -> SimEvent:
        """Request a message from `source` at rank `target`. The returned event is triggered when all of it arrived.

        Raises, here or in `send`:
            MessageMismatch: the message has not the `nbytes` that are expected, if they are.
        """
        entry = self._message_key(source, target, key)
        received = SimEvent()
        self._pending_recvs.setdefault(entry, deque()).append((nbytes, received))
        self._enqueue(target, source, key, REQUEST_BYTES, lambda: self._on_request(source, target, key, entry))
        return received

    def latency_between(self, a: int, b: int) -> float:
        """Return the latency between two ranks."""
        return self._route(a // self.ranks_per_host, b // self.ranks_per_host).latency_s

    def _message_key(self, a: int, b: int, key: Hashable) -> Hashable:
        if self.symmetric:  # shift both ranks so that the receiver is on the first host
            shift = b // self.ranks_per_host * self.ranks_per_host
            a = (a - shift) % self.ranks
            b -= shift
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
        expected, received = self._pending_recvs[message_key].popleft()
        if expected not in (None, nbytes):
            raise MessageMismatch(f"rank {a} sends {nbytes} bytes to rank {b}, which receives into {expected}")
        sent.trigger()
        self._enqueue(a, b, key, nbytes, received.trigger)

    def _enqueue(self, a: int, b: int, key: MessageKey, nbytes: int, done: Callable[[], None]) -> None:
        """Queue a message in chunks behind earlier ones of its connection."""
        connection = self._connection(a, b, key[0])
        while nbytes > CHUNK_BYTES:
            connection.queue.append((CHUNK_BYTES, _no_op))
            nbytes -= CHUNK_BYTES
        connection.queue.append((nbytes, done))
        self._fill_port(a, b, connection)

    def _fill_port(self, a: int, b: int, connection: Connection) -> None:
        """Move chunks into the port, as many as the window allows."""
        while connection.queue and (
            not connection.port_bytes or connection.port_bytes + connection.queue[0][0] <= CONNECTION_WINDOW_BYTES
        ):
            room = connection.slow_start.available_bytes(self.clock.now_s)
            if room < min(1, connection.queue[0][0]):  # not even for one byte
                return
            nbytes, done = connection.queue.popleft()
            if nbytes > room:
                connection.queue.appendleft((nbytes - int(room), done))
                nbytes = int(room)
                done = _no_op
            connection.port_bytes += nbytes
            if room < math.inf:
                connection.slow_start.on_send(nbytes, self.clock.now_s)
                done = self._with_ack(a, b, connection, nbytes, done)
            exit_s = self._transmit(a, b, nbytes, done)
            self.clock.schedule(exit_s, lambda nbytes=nbytes: self._on_port_exit(a, b, connection, nbytes))

    def _with_ack(
        self, a: int, b: int, connection: Connection, nbytes: int, done: Callable[[], None]
    ) -> Callable[[], None]:
        """Extend the action on arrival: an acknowledgement makes room in the window a latency later."""

        def on_ack() -> None:
            connection.slow_start.on_ack(nbytes)
            self._fill_port(a, b, connection)

        def on_arrival() -> None:
            done()
            self.clock.schedule(self.clock.now_s + self.latency_between(a, b), on_ack)

        return on_arrival

    def _connection(self, a: int, b: int, connection: Hashable) -> Connection:
        """Return a connection, which is made at its first use."""
        entry = self._message_key(a, b, connection)
        if entry not in self._connections:
            slow_start = self._make_slow_start(a // self.ranks_per_host, b // self.ranks_per_host)
            self._connections[entry] = Connection(slow_start)
        return self._connections[entry]

    def _make_slow_start(self, one: int, other: int) -> SlowStart:
        route = self._route(one, other)
        initial_bytes = math.inf
        if one != other and self.links.initial_window_bytes:
            initial_bytes = self.links.initial_window_bytes
        rate = min(route.rate, self.links.port_rates(one)[0], self.links.port_rates(other)[1])
        round_trip_s = 2 * route.latency_s
        return SlowStart(initial_bytes, CONNECTION_WINDOW_BYTES + round_trip_s * rate, round_trip_s)

    def _on_port_exit(self, a: int, b: int, connection: Connection, nbytes: int) -> None:
        connection.port_bytes -= nbytes
        self._fill_port(a, b, connection)

    def _transmit(self, a: int, b: int, nbytes: int, done: Callable[[], None]) -> float:
        """Pass a chunk through both ports. Returns when it will have left the first."""
        one = a // self.ranks_per_host
        other = b // self.ranks_per_host
        route = self._route(one, other)
        if one == other:
            return self._transmit_intra_host(a, b, nbytes, route, done)
        if self.symmetric:
            one = other = 0
        start_s = max(self.clock.now_s, self._up_free_s[one])
        exit_s = start_s + nbytes / self.up_rates[one]
        self._up_free_s[one] = exit_s
        if route.rate < math.inf:
            pair_exit_s = max(start_s, self._pair_free_s.get((one, other), 0.0)) + nbytes / route.rate
            exit_s = max(exit_s, pair_exit_s)
            self._pair_free_s[one, other] = exit_s

        def on_arrival() -> None:
            recv_start_s = max(self.clock.now_s, self._down_free_s[other])
            self._down_free_s[other] = recv_start_s + nbytes / self.down_rates[other]
            self.clock.schedule(max(self._down_free_s[other], exit_s + route.latency_s), done)

        self.clock.schedule(start_s + route.latency_s, on_arrival)
        return exit_s

    def _transmit_intra_host(self, a: int, b: int, nbytes: int, route: _Route, done: Callable[[], None]) -> float:
        """Pass a chunk between two ranks of one host, at the rate of this pair."""
        pair = (-1 - a, -1 - b)  # negative: no pair of hosts
        exit_s = max(self.clock.now_s, self._pair_free_s.get(pair, 0.0)) + nbytes / route.rate
        self._pair_free_s[pair] = exit_s
        self.clock.schedule(exit_s + route.latency_s, done)
        return exit_s

    def _route(self, one: int, other: int) -> _Route:
        if (one, other) not in self._routes:
            link = self.links.link_between(one, other)
            port_rate = min(self.links.port_rates(one)[0], self.links.port_rates(other)[1])
            rate = math.inf
            if one == other or link.bandwidth < port_rate:
                rate = self._rate_factor * link.bandwidth
            self._routes[one, other] = _Route(link.latency, rate)
        return self._routes[one, other]


# Collectives ----------------------------------------------------------------------------------------------------------


def all_reduce(
    network: Network, ranks: Sequence[int], index: int, key: MessageKey, nbytes: int, reduce_s_per_byte: float
) -> Process:
    """Play gloo's ring all-reduce as rank `ranks[index]`: a reduce-scatter, then an all-gather.

    Args:
        network: that carries the messages.
        ranks: members of the group.
        index: of this rank in `ranks`.
        key: of this collective.
        nbytes: of the vector.
        reduce_s_per_byte: seconds to add one byte to another.
    """
    size = len(ranks)
    segment = _round_up(min(-(-nbytes // (2 * size)), MAX_SEGMENT_BYTES), 4)
    count = _round_up(max(-(-nbytes // segment), 2 * size), size)

    def segment_lengths(first: int) -> list[int]:
        """Return the lengths of the segments from chunk `first` on; 0 beyond the end of the vector."""
        starts = ((first * (count // size) + i) % count * segment for i in range(count - count // size))
        return [max(0, min(segment, nbytes - start)) for start in starts]

    neighbors = (ranks[(index + 1) % size], ranks[index], ranks[index - 1])
    chunks = [segment_lengths(index + i) for i in range(3)]
    yield from _ring_pass(network, neighbors, (*key, "reduce_scatter"), chunks[1], chunks[2], reduce_s_per_byte)
    yield from _ring_pass(network, neighbors, (*key, "all_gather"), chunks[0], chunks[1], 0.0)


def all_gather(network: Network, ranks: Sequence[int], index: int, key: MessageKey, nbytes: int) -> Process:
    """Play gloo's ring all-gather of `nbytes` per rank as rank `ranks[index]`."""
    size = len(ranks)
    halves = [nbytes // 2, nbytes - nbytes // 2] * (size - 1)
    neighbors = (ranks[index - 1], ranks[index], ranks[(index + 1) % size])
    yield from _ring_pass(network, neighbors, key, halves, halves, 0.0)


def all_to_all(network: Network, ranks: Sequence[int], index: int, key: MessageKey, nbytes: int) -> Process:
    """Play an all-to-all as rank `ranks[index]`: an equal part of `nbytes` to every other rank."""
    size = len(ranks)
    rank = ranks[index]
    events: list[SimEvent] = []
    for i in range(1, size):
        events.append(network.send(rank, ranks[(index + i) % size], key, nbytes // size))
        events.append(network.recv(ranks[index - i], rank, key))
    yield from events


def _ring_pass(
    network: Network,
    neighbors: tuple[int, int, int],
    key: MessageKey,
    send_lengths: Sequence[int],
    recv_lengths: Sequence[int],
    reduce_s_per_byte: float,
) -> Process:
    """Receive segments from one neighbor and send segments to the other, two in flight. Empty ones are skipped.

    Args:
        network: that carries the messages. If it is symmetric, what this rank sends stands for what it receives, so it
            requests as many segments as it sends.
        neighbors: the rank that sends to this one, this one, the rank that receives from it.
        key: of this pass.
        send_lengths: bytes of the segments to send.
        recv_lengths: bytes of the segments to receive.
        reduce_s_per_byte: seconds to add one byte to another.
    """
    source, rank, target = neighbors
    num_merged = -(-len(send_lengths) // network.max_segments)
    send_lengths = _merge_segments(send_lengths, num_merged)
    recv_lengths = _merge_segments(recv_lengths, num_merged)
    request_s = 0.0
    if num_merged > 1:  # of merged segments, all but one would have waited for a request and its answer
        request_s = 2 * (num_merged - 1) / MAX_IN_FLIGHT * network.latency_between(source, rank)
    requested = send_lengths if network.symmetric else recv_lengths
    sends, recvs = list[SimEvent | None](), list[SimEvent | None]()
    for i in range(len(send_lengths) + MAX_IN_FLIGHT):
        if i >= MAX_IN_FLIGHT:
            received = recvs[i - MAX_IN_FLIGHT]
            sent = sends[i - MAX_IN_FLIGHT]
            if received:
                yield received
                yield recv_lengths[i - MAX_IN_FLIGHT] * reduce_s_per_byte + request_s
            if sent:
                yield sent
        if i < len(send_lengths):
            recvs.append(network.recv(source, rank, key) if requested[i] else None)
            sends.append(network.send(rank, target, key, send_lengths[i]) if send_lengths[i] else None)


def _merge_segments(lengths: Sequence[int], num_merged: int) -> Sequence[int]:
    return [sum(lengths[i : i + num_merged]) for i in range(0, len(lengths), num_merged)]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# TCP ------------------------------------------------------------------------------------------------------------------


class SlowStart:
    """The congestion window of one direction of a connection, as TCP opens it (RFC 5681, RFC 2861).

    It starts with `initial_bytes` (infinity: open at once), grows by every acknowledged byte up to `max_bytes`, and is
    halved for each timeout that the connection was idle.
    """

    def __init__(self, initial_bytes: float, max_bytes: float, round_trip_s: float):
        self.initial_bytes = initial_bytes
        self.max_bytes = max(initial_bytes, max_bytes)
        self.round_trip_s = round_trip_s
        self._window_bytes = initial_bytes
        self._in_flight_bytes = 0
        self._last_send_s = 0.0

    def available_bytes(self, now_s: float) -> float:
        """Return how many bytes may be sent now."""
        timeouts = math.floor((now_s - self._last_send_s) / (self.round_trip_s + IDLE_TIMEOUT_S))
        if timeouts and not self._in_flight_bytes and self._window_bytes > self.initial_bytes:
            self._window_bytes = max(self.initial_bytes, self._window_bytes / 2 ** min(timeouts, 60))
            self._last_send_s = now_s
        return self._window_bytes - self._in_flight_bytes

    def on_send(self, nbytes: int, now_s: float) -> None:
        """Count bytes that were sent."""
        self._in_flight_bytes += nbytes
        self._last_send_s = now_s

    def on_ack(self, nbytes: int) -> None:
        """Count bytes that were acknowledged."""
        self._in_flight_bytes -= nbytes
        self._window_bytes = min(self.max_bytes, self._window_bytes + nbytes)
