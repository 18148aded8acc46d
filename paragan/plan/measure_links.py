"""Measure the links between hosts, with messages that really travel.

One rank of every host, the first, speaks for it. Pair by pair, while the others are silent: how long a short message
takes, how fast long ones pass, one way, the other, and both at once; then all hosts at once, each to the next. Ranks
that share a host are found by its name, its boot and its network namespace. What a connection sends at once after a
rest is not timed: it is ten packets (RFC 6928), and the system knows how long one may be on the way to rank 0.
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

from paragan.comm.world import World, master_address
from paragan.core.devices import backend_of
from paragan.core.errors import UsageError
from paragan.plan.links import DEFAULT_INTRA_HOST_LINK, Link, Links

PING_BYTES = 8  # bytes
NUM_PINGS = 11  # short messages there and back, of which the median counts
MIN_BULK_BYTES = 64 << 10  # bytes: a long message begins so, and grows until it takes SECONDS
MAX_BULK_BYTES = 256 << 20
BULK_S = 0.25
QUICK_BULK_S = 0.05  # where it is to be quick
QUICK_PEERS_PER_HOST = 3  # of every host then
PAIR_ENTRY_THRESHOLD = 0.9  # a pair that is slower than this share of its ports has an entry of its own
IP_MTU = 14  # of Linux's socket options
HEADER_BYTES = 52  # bytes of a packet: IP's, and TCP's with a time stamp
INITIAL_WINDOW_PACKETS = 10
LATENCY_TOLERANCE = 0.2  # and one whose latency differs by more than this share, or by a tenth of a millisecond


@dataclass(frozen=True)
class PairMeasurement:
    """Two hosts: seconds of a short message, bytes a second there, back, and each way where both send."""

    latency_s: float
    forward_rate: float
    reverse_rate: float
    duplex_rate: float

    def best_with(self, other: PairMeasurement) -> PairMeasurement:
        """The best of both in everything."""
        rates = (max(getattr(self, way), getattr(other, way)) for way in ("there", "back", "both"))
        return PairMeasurement(min(self.latency_s, other.latency_s), *rates)


def measure_links(world: World, log: Any = lambda line: None, quick: bool = False) -> Links:
    """Every rank calls this, and learns the same. Unusable for a world of one rank.

    quick: every host is measured with a few others alone, all at once, and those that are not are taken to be alike.
    """
    if world.size == 1:
        raise UsageError("one rank has no links: start several, under any launcher or with --ranks 2")
    hosts = _ranks_by_host(world)
    speakers = [ranks[0] for ranks in hosts]
    measure = _LinkProbe(world, QUICK_BULK_S if quick else BULK_S)
    found = dict[tuple[int, int], PairMeasurement]()
    for matches in round_robin(len(hosts))[:QUICK_PEERS_PER_HOST] if quick else _sequential_pairs(len(hosts)):
        for (a, b), pair in zip(matches, measure.measure_pairs([(speakers[a], speakers[b]) for a, b in matches])):
            found[a, b] = pair
            log(f"hosts {a} and {b}: {Link(pair.forward_rate, pair.latency_s).describe()}")
    for pair in (
        [] if quick else _links_from_pairs(hosts, found, None).pairs
    ):  # or somebody else was on the way: asked once more
        a, b = map(int, pair.split("-"))
        found[a, b] = found[a, b].best_with(measure.measure_pairs([(speakers[a], speakers[b])])[0])
    shared = next((ranks for ranks in hosts if len(ranks) > 1), None)
    within = measure.measure_pairs([(shared[0], shared[1])])[0] if shared else None
    links = _links_from_pairs(hosts, found, within)
    if len(speakers) > 2 and not quick:
        nbytes = _contention_bytes(links)
        links = _with_contention(links, nbytes, measure.measure_ring(speakers, nbytes))
    links = dataclasses.replace(links, initial_window_bytes=measure.initial_window_bytes(speakers))
    about = {
        "backend": backend_of(world.device).dist_backend.rpartition(":")[2],
        "date": datetime.date.today().isoformat(),
    }
    return dataclasses.replace(links, measurement=about)


def round_robin(size: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which nobody is in two: one stays, the others go round."""
    seats = [*range(size), *([-1] if size % 2 else [])]
    rounds = list[list[tuple[int, int]]]()
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], seats[::-1])
        rounds.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _sequential_pairs(size: int) -> list[list[tuple[int, int]]]:
    return [[pair] for pair in itertools.combinations(range(size), 2)]


def _ranks_by_host(world: World) -> list[list[int]]:
    """The ranks of every host, in rank order. Unusable where hosts have different numbers of them."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(world.all_gather_str(_host_id())):
        hosts.setdefault(name, []).append(rank)
    counts = {len(ranks) for ranks in hosts.values()}
    if len(counts) > 1:
        told = ", ".join(str(len(ranks)) for ranks in hosts.values())
        raise UsageError(
            f"hosts have different numbers of ranks ({told}): start as many on each", same_on_all_ranks=True
        )
    return list(hosts.values())


def _host_id() -> str:
    """Where two ranks say the same, no network lies between them."""
    words = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            words.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            continue
    return json.dumps(words)


def _payload_bytes_per_packet() -> float:
    """Bytes of numbers in a packet on the way to rank 0; inf where it is on this host, or the system (Linux) keeps it
    to itself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # sends nothing
            s.connect(master_address(os.environ))
            local = s.getsockname()[0] == s.getpeername()[0]
            return math.inf if local else s.getsockopt(socket.IPPROTO_IP, IP_MTU) - HEADER_BYTES
    except (OSError, UsageError):
        return math.inf


def _links_from_pairs(
    hosts: Sequence[Sequence[int]], pairs: Mapping[tuple[int, int], PairMeasurement], intra_host: PairMeasurement | None
) -> Links:
    """Ports as fast as their fastest pair, and an entry for every pair that is slower, or further."""
    n, inside = (
        len(hosts),
        DEFAULT_INTRA_HOST_LINK
        if intra_host is None
        else Link(min(intra_host.forward_rate, intra_host.reverse_rate), intra_host.latency_s),
    )
    base = Links(hosts=n, ranks_per_host=len(hosts[0]), up=inside.bandwidth, latency=inside.latency, intra_host=inside)
    if n == 1:
        return base
    way = {(a, b): p.forward_rate for (a, b), p in pairs.items()} | {
        (b, a): p.reverse_rate for (a, b), p in pairs.items()
    }
    up = [max(rate for (a, _), rate in way.items() if a == host) for host in range(n)]
    down = [max(rate for (_, b), rate in way.items() if b == host) for host in range(n)]
    latency = statistics.median(pair.latency_s for pair in pairs.values())
    both = [p.duplex_rate / min(p.forward_rate, p.reverse_rate) for p in pairs.values()]
    slower = {
        f"{a}-{b}": Link(min(p.forward_rate, p.reverse_rate), p.latency_s)
        for (a, b), p in pairs.items()
        if p.forward_rate < PAIR_ENTRY_THRESHOLD * min(up[a], down[b])
        or p.reverse_rate < PAIR_ENTRY_THRESHOLD * min(up[b], down[a])
        or abs(p.latency_s - latency) > max(LATENCY_TOLERANCE * latency, 1e-4)
    }
    return dataclasses.replace(
        base, up=up, down=down, latency=latency, pairs=slower, duplex_efficiency=min(1.0, statistics.median(both))
    )


def _contention_bytes(links: Links) -> int:
    """Bytes that take the slowest port long enough."""
    slowest = min(min(links.port_rates(host)) for host in range(links.hosts))
    return int(min(MAX_BULK_BYTES, max(MIN_BULK_BYTES, slowest * max(BULK_S, 20 * (links.latency or 0)))))


def _with_contention(links: Links, nbytes: int, seconds: Sequence[float]) -> Links:
    """What is left of the rates where all hosts send to the next at once, which took each so long."""
    left = list[float]()
    for host, took in enumerate(seconds):
        ways = (links.link_between(host, (host + 1) % links.hosts), links.link_between((host - 1) % links.hosts, host))
        alone = max(2 * link.latency + nbytes / (links.duplex_efficiency * link.bandwidth) for link in ways)
        left.append(alone / took)
    return dataclasses.replace(links, contention_efficiency=min(1.0, statistics.median(left)))


class _LinkProbe:
    """What some ranks do while the others wait at the next meeting."""

    def __init__(self, world: World, seconds: float):
        self.world, self.rank, self.group, self.bulk_s = world, world.rank, world.all_ranks, seconds

    def measure_pairs(self, matches: Sequence[tuple[int, int]]) -> list[PairMeasurement]:
        """What lies between two ranks each, at the same time; all ranks call this."""
        told = [0.0] * 4
        for a, b in matches:
            if self.rank in (a, b):
                other, first = (b, True) if self.rank == a else (a, False)
                swap = self._measure_round_trip(other)
                ways = ((first, not first), (not first, first), (True, True))
                told = [swap / 2, *(self._measure_rate(other, swap, *way) for way in ways)]
        rows = self._gather_rows(told)
        return [PairMeasurement(*rows[a]) for a, _ in matches]

    def measure_ring(self, ranks: Sequence[int], nbytes: int) -> list[float]:
        """Seconds that each of some ranks takes to send so much to the next and hear as much from the one before, while
        all of them do."""
        tell, hear = dict[int, Tensor](), dict[int, Tensor]()
        if self.rank in ranks:
            place = ranks.index(self.rank)
            tell[ranks[(place + 1) % len(ranks)]] = self._zeros(nbytes)
            hear[ranks[place - 1]] = self._zeros(nbytes)
        seconds = 0.0
        for _ in range(2):  # the first opens windows
            self._gather_rows([0.0])
            seconds = self._time_send_recv(tell, hear)
        told = self._gather_rows([seconds])
        return [told[rank][0] for rank in ranks]

    def initial_window_bytes(self, ranks: Sequence[int]) -> int | None:
        """Bytes of the first ten packets between some ranks; None where no system says so."""
        packets = [row[0] for row in self._gather_rows([_payload_bytes_per_packet()])]
        shortest = min(packets[rank] for rank in ranks)
        return None if shortest == math.inf else INITIAL_WINDOW_PACKETS * round(shortest)

    def _measure_round_trip(self, other: int) -> float:
        """Seconds of a short swap: there and back, since a message leaves when it has been asked for."""
        times = [self._time_send_recv(*self._payloads(other, PING_BYTES)) for _ in range(NUM_PINGS)]
        return self._max_with_peer(other, statistics.median(times[1:]))

    def _measure_rate(self, other: int, round_trip_s: float, sends: bool, receives: bool) -> float:
        """Bytes a second of messages that grow until one takes long enough for the links' windows to open."""
        nbytes, enough = MIN_BULK_BYTES, max(self.bulk_s, 10 * round_trip_s)
        while True:
            tell = {other: self._zeros(nbytes if sends else PING_BYTES)}
            hear = {other: self._zeros(nbytes if receives else PING_BYTES)}
            self._time_send_recv(*self._payloads(other, PING_BYTES))  # begin together
            seconds = self._max_with_peer(other, self._time_send_recv(tell, hear))
            if seconds >= enough or nbytes >= MAX_BULK_BYTES:
                return nbytes / max(seconds - round_trip_s, seconds / 2)
            nbytes = min(MAX_BULK_BYTES, nbytes * max(2, min(16, int(1.2 * enough / seconds) + 1)))

    def _max_with_peer(self, other: int, seconds: float) -> float:
        """The longer of what both have measured, so that both go on alike."""
        mine, theirs = (torch.tensor([value], dtype=torch.float64, device=self.world.device) for value in (seconds, 0))
        self.group.send_recv({other: mine}, {other: theirs}).wait()
        return max(float(mine), float(theirs))

    def _payloads(self, other: int, nbytes: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return {other: self._zeros(nbytes)}, {other: self._zeros(nbytes)}

    def _zeros(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.world.device)

    def _time_send_recv(self, sends: Mapping[int, Tensor], recvs: Mapping[int, Tensor]) -> float:
        """Seconds until what is told has left and what is heard is here."""
        start = time.perf_counter()
        self.group.send_recv(sends, recvs).wait()
        backend_of(self.world.device).synchronize(self.world.device)
        return time.perf_counter() - start

    def _gather_rows(self, row: Sequence[float]) -> list[list[float]]:
        """Everyone's row, in rank order."""
        rows, work = self.group.all_gather(torch.tensor(row, dtype=torch.float64, device=self.world.device))
        work.wait()
        return rows.tolist()
