"""Measure the links between hosts with real messages: `paragan bench links` and `--strategy auto`.

The first rank of each host represents it. Hosts are measured pair by pair, while the others wait: the latency of short
messages, and the rate of long messages in one direction, in the other, and in both at once. Then all hosts send at
once, each to the next. Ranks are on one host if host name, boot id and network namespace agree.

The initial window of a connection is not measured. It is ten packets (RFC 6928), and the size of a packet is read from
the connection to rank 0.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import math
import os
import platform
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paragan.comm.launch_info import master_address
from paragan.comm.world import World
from paragan.core.devices import backend_of
from paragan.core.errors import UsageError
from paragan.plan.links import DEFAULT_INTRA_HOST_LINK, Link, Links

PING_BYTES = 8
NUM_PINGS = 11  # round trips of short messages; the median counts
MIN_BULK_BYTES = 64 << 10  # size of the first long message; it grows until one takes BULK_S
MAX_BULK_BYTES = 256 << 20
BULK_S = 0.25
QUICK_BULK_S = 0.05  # in quick mode
QUICK_PEERS_PER_HOST = 3  # hosts that each host is measured with in quick mode
PAIR_ENTRY_THRESHOLD = 0.9  # a pair slower than this fraction of its ports gets its own entry
LATENCY_TOLERANCE = 0.2  # so does one whose latency differs from the median by more than this fraction and by
MIN_LATENCY_DIFFERENCE_S = 1e-4  # more than this
IP_MTU = 14  # a socket option of Linux
HEADER_BYTES = 52  # of a packet: the IP header, and the TCP header with a time stamp
INITIAL_WINDOW_PACKETS = 10


@dataclass(frozen=True)
class PairMeasurement:
    """The link between two hosts. Rates are in bytes per second."""

    latency_s: float  # of a short message
    forward_rate: float
    reverse_rate: float
    duplex_rate: float  # in each direction, while both send

    def best_with(self, other: PairMeasurement) -> PairMeasurement:
        """Return the better value of both measurements, for each field."""
        return PairMeasurement(
            min(self.latency_s, other.latency_s),
            max(self.forward_rate, other.forward_rate),
            max(self.reverse_rate, other.reverse_rate),
            max(self.duplex_rate, other.duplex_rate),
        )


def measure_links(world: World, log: Any = lambda line: None, quick: bool = False) -> Links:
    """Measure the links of a world. All ranks call it together and get the same result.

    Args:
        world: of at least two ranks.
        log: is called with one line per pair of hosts.
        quick: measure each host with a few others only, all pairs at the same time; the links that are not measured
            are taken to be like the others.

    Raises:
        UsageError: the world has one rank.
    """
    if world.size == 1:
        raise UsageError("one rank has no links. Start several: with a launcher, or with --ranks 2")
    hosts = _ranks_by_host(world)
    first_ranks = [ranks[0] for ranks in hosts]
    probe = _LinkProbe(world, QUICK_BULK_S if quick else BULK_S)
    pairs = dict[tuple[int, int], PairMeasurement]()
    schedule = round_robin(len(hosts))[:QUICK_PEERS_PER_HOST] if quick else _sequential_pairs(len(hosts))
    for matches in schedule:
        measured = probe.measure_pairs([(first_ranks[a], first_ranks[b]) for a, b in matches])
        for (a, b), pair in zip(matches, measured):
            pairs[a, b] = pair
            log(f"hosts {a} and {b}: {Link(pair.forward_rate, pair.latency_s).describe()}")
    if not quick:  # measure slow pairs once more: other traffic may have slowed them
        for entry in _links_from_pairs(hosts, pairs, None).pairs:
            a, b = map(int, entry.split("-"))
            pairs[a, b] = pairs[a, b].best_with(probe.measure_pairs([(first_ranks[a], first_ranks[b])])[0])
    shared_host = next((ranks for ranks in hosts if len(ranks) > 1), None)
    intra_host = probe.measure_pairs([(shared_host[0], shared_host[1])])[0] if shared_host else None
    links = _links_from_pairs(hosts, pairs, intra_host)
    if len(first_ranks) > 2 and not quick:
        nbytes = _contention_bytes(links)
        links = _with_contention(links, nbytes, probe.measure_ring(first_ranks, nbytes))
    measurement = {
        "backend": backend_of(world.device).dist_backend.rpartition(":")[2],
        "date": datetime.date.today().isoformat(),
    }
    window = probe.initial_window_bytes(first_ranks)
    return dataclasses.replace(links, initial_window_bytes=window, measurement=measurement)


def round_robin(size: int) -> list[list[tuple[int, int]]]:
    """List every pair of `size` hosts once, in rounds in which no host is in two pairs (the circle method)."""
    circle = [*range(size), *([-1] if size % 2 else [])]  # -1: no partner in this round
    rounds = list[list[tuple[int, int]]]()
    for _ in range(len(circle) - 1):
        pairs = zip(circle[: len(circle) // 2], circle[::-1])
        rounds.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return rounds


def _sequential_pairs(size: int) -> list[list[tuple[int, int]]]:
    return [[pair] for pair in itertools.combinations(range(size), 2)]


def _ranks_by_host(world: World) -> list[list[int]]:
    """Return the ranks of each host.

    Raises:
        UsageError: hosts have different numbers of ranks.
    """
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(world.all_gather_str(_host_id())):
        hosts.setdefault(host, []).append(rank)
    counts = [len(ranks) for ranks in hosts.values()]
    if len(set(counts)) > 1:
        raise UsageError(
            f"WORLD_SIZE={world.size}: hosts have different numbers of ranks ({', '.join(map(str, counts))}). "
            "Start equally many on each",
            same_on_all_ranks=True,
        )
    return list(hosts.values())


def _host_id() -> str:
    """Return a text that is equal for two ranks if there is no network between them."""
    words = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            words.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            continue
    return json.dumps(words)


def _payload_bytes_per_packet() -> float:
    """Return the bytes of data in a packet to rank 0; infinity if rank 0 is on this host, or the system cannot tell."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # sends nothing
            s.connect(master_address(os.environ))
            is_local = s.getsockname()[0] == s.getpeername()[0]
            return math.inf if is_local else s.getsockopt(socket.IPPROTO_IP, IP_MTU) - HEADER_BYTES
    except (OSError, UsageError):
        return math.inf


def _links_from_pairs(
    hosts: Sequence[Sequence[int]], pairs: Mapping[tuple[int, int], PairMeasurement], intra_host: PairMeasurement | None
) -> Links:
    """Make links: each port is as fast as its fastest pair, and pairs that are slower or farther get an entry."""
    num_hosts = len(hosts)
    inside = DEFAULT_INTRA_HOST_LINK
    if intra_host is not None:
        inside = Link(min(intra_host.forward_rate, intra_host.reverse_rate), intra_host.latency_s)
    links = Links(
        hosts=num_hosts, ranks_per_host=len(hosts[0]), up=inside.bandwidth, latency=inside.latency, intra_host=inside
    )
    if num_hosts == 1:
        return links
    rates = {(a, b): p.forward_rate for (a, b), p in pairs.items()}
    rates |= {(b, a): p.reverse_rate for (a, b), p in pairs.items()}
    up = [max(rate for (a, _), rate in rates.items() if a == host) for host in range(num_hosts)]
    down = [max(rate for (_, b), rate in rates.items() if b == host) for host in range(num_hosts)]
    latency = statistics.median(pair.latency_s for pair in pairs.values())
    duplex = [p.duplex_rate / min(p.forward_rate, p.reverse_rate) for p in pairs.values()]
    entries: dict[str, Link] = {}
    for (a, b), pair in pairs.items():
        is_slow = pair.forward_rate < PAIR_ENTRY_THRESHOLD * min(
            up[a], down[b]
        ) or pair.reverse_rate < PAIR_ENTRY_THRESHOLD * min(up[b], down[a])
        is_far = abs(pair.latency_s - latency) > max(LATENCY_TOLERANCE * latency, MIN_LATENCY_DIFFERENCE_S)
        if is_slow or is_far:
            entries[f"{a}-{b}"] = Link(min(pair.forward_rate, pair.reverse_rate), pair.latency_s)
    return dataclasses.replace(
        links, up=up, down=down, latency=latency, pairs=entries, duplex_efficiency=min(1.0, statistics.median(duplex))
    )


def _contention_bytes(links: Links) -> int:
    """Return a message size that keeps the slowest port busy for long enough to measure."""
    slowest = min(min(links.port_rates(host)) for host in range(links.hosts))
    return int(min(MAX_BULK_BYTES, max(MIN_BULK_BYTES, slowest * max(BULK_S, 20 * (links.latency or 0)))))


def _with_contention(links: Links, nbytes: int, seconds: Sequence[float]) -> Links:
    """Set the contention efficiency from the seconds that each host took while all sent `nbytes` to the next one."""
    efficiencies = list[float]()
    for host, measured_s in enumerate(seconds):
        neighbors = (
            links.link_between(host, (host + 1) % links.hosts),
            links.link_between((host - 1) % links.hosts, host),
        )
        expected_s = max(2 * link.latency + nbytes / (links.duplex_efficiency * link.bandwidth) for link in neighbors)
        efficiencies.append(expected_s / measured_s)
    return dataclasses.replace(links, contention_efficiency=min(1.0, statistics.median(efficiencies)))


class _LinkProbe:
    """Sends messages between some ranks, while the other ranks wait in the next collective."""

    def __init__(self, world: World, bulk_s: float):
        self.world = world
        self.rank = world.rank
        self.group = world.all_ranks
        self.bulk_s = bulk_s

    def measure_pairs(self, matches: Sequence[tuple[int, int]]) -> list[PairMeasurement]:
        """Measure the links between pairs of ranks at the same time. All ranks call it."""
        row = [0.0] * 4
        for a, b in matches:
            if self.rank in (a, b):
                peer = b if self.rank == a else a
                is_first = self.rank == a
                round_trip_s = self._measure_round_trip(peer)
                row = [
                    round_trip_s / 2,
                    self._measure_rate(peer, round_trip_s, sends=is_first, receives=not is_first),
                    self._measure_rate(peer, round_trip_s, sends=not is_first, receives=is_first),
                    self._measure_rate(peer, round_trip_s, sends=True, receives=True),
                ]
        rows = self._gather_rows(row)
        return [PairMeasurement(*rows[a]) for a, _ in matches]

    def measure_ring(self, ranks: Sequence[int], nbytes: int) -> list[float]:
        """Return the seconds in which each of `ranks` sends `nbytes` to the next and receives as much from the one
        before, all at the same time."""
        sends, recvs = dict[int, Tensor](), dict[int, Tensor]()
        if self.rank in ranks:
            index = ranks.index(self.rank)
            sends[ranks[(index + 1) % len(ranks)]] = self._zeros(nbytes)
            recvs[ranks[index - 1]] = self._zeros(nbytes)
        seconds = 0.0
        for _ in range(2):  # the first opens the windows of the connections
            self._gather_rows([0.0])
            seconds = self._time_send_recv(sends, recvs)
        rows = self._gather_rows([seconds])
        return [rows[rank][0] for rank in ranks]

    def initial_window_bytes(self, ranks: Sequence[int]) -> int | None:
        """Return the data bytes of the first ten packets between `ranks`; None if no system can tell."""
        packets = [row[0] for row in self._gather_rows([_payload_bytes_per_packet()])]
        shortest = min(packets[rank] for rank in ranks)
        return None if shortest == math.inf else INITIAL_WINDOW_PACKETS * round(shortest)

    def _measure_round_trip(self, peer: int) -> float:
        """Return the seconds of a short exchange. It takes a round trip: gloo sends when the receiver has asked."""
        times = [self._time_send_recv(*self._payloads(peer, PING_BYTES)) for _ in range(NUM_PINGS)]
        return self._max_with_peer(peer, statistics.median(times[1:]))

    def _measure_rate(self, peer: int, round_trip_s: float, *, sends: bool, receives: bool) -> float:
        """Return bytes per second. Messages grow until one takes long enough for the TCP windows to open."""
        nbytes = MIN_BULK_BYTES
        enough_s = max(self.bulk_s, 10 * round_trip_s)
        while True:
            outgoing = {peer: self._zeros(nbytes if sends else PING_BYTES)}
            incoming = {peer: self._zeros(nbytes if receives else PING_BYTES)}
            self._time_send_recv(*self._payloads(peer, PING_BYTES))  # both start together
            seconds = self._max_with_peer(peer, self._time_send_recv(outgoing, incoming))
            if seconds >= enough_s or nbytes >= MAX_BULK_BYTES:
                return nbytes / max(seconds - round_trip_s, seconds / 2)
            nbytes = min(MAX_BULK_BYTES, nbytes * max(2, min(16, int(1.2 * enough_s / seconds) + 1)))

    def _max_with_peer(self, peer: int, seconds: float) -> float:
        """Return the longer of both ranks' times, so that both continue in the same way."""
        outgoing, incoming = (
            torch.tensor([value], dtype=torch.float64, device=self.world.device) for value in (seconds, 0)
        )
        self.group.send_recv({peer: outgoing}, {peer: incoming}).wait()
        return max(float(outgoing), float(incoming))

    def _payloads(self, peer: int, nbytes: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return {peer: self._zeros(nbytes)}, {peer: self._zeros(nbytes)}

    def _zeros(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.world.device)

    def _time_send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> float:
        """Return the seconds until all messages are sent and received."""
        start = time.perf_counter()
        self.group.send_recv(sends, recvs).wait()
        backend_of(self.world.device).synchronize(self.world.device)
        return time.perf_counter() - start

    def _gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        """Return the rows of all ranks, in rank order."""
        rows, work = self.group.all_gather(torch.tensor(row, dtype=torch.float64, device=self.world.device))
        work.wait()
        return rows.tolist()
