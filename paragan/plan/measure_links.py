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

from paragan.comm.world import World, meeting_point
from paragan.core.devices import kind_of
from paragan.core.errors import Unusable
from paragan.plan.links import WITHIN, Link, Links

SHORT = 8  # bytes
ROUNDS = 11  # short messages there and back, of which the median counts
FIRST = 64 << 10  # bytes: a long message begins so, and grows until it takes SECONDS
MOST = 256 << 20
SECONDS = 0.25
QUICK = 0.05  # where it is to be quick
MATCHES = 3  # of every host then
OWN_ENTRY = 0.9  # a pair that is slower than this share of its ports has an entry of its own
IP_MTU = 14  # of Linux's socket options
HEADERS = 52  # bytes of a packet: IP's, and TCP's with a time stamp
FIRST_PACKETS = 10
SAME = 0.2  # and one whose latency differs by more than this share, or by a tenth of a millisecond


@dataclass(frozen=True)
class Pair:
    """Two hosts: seconds of a short message, bytes a second there, back, and each way where both send."""

    latency: float
    there: float
    back: float
    both: float

    def better(self, other: Pair) -> Pair:
        """The best of both in everything."""
        rates = (max(getattr(self, way), getattr(other, way)) for way in ("there", "back", "both"))
        return Pair(min(self.latency, other.latency), *rates)


def measure_links(world: World, say: Any = lambda line: None, quick: bool = False) -> Links:
    """Every rank calls this, and learns the same. Unusable for a world of one rank.

    quick: every host is measured with a few others alone, all at once, and those that are not are taken to be alike.
    """
    if world.size == 1:
        raise Unusable("one rank has no links: start several, under any launcher or with --ranks 2")
    hosts = _hosts(world)
    speakers = [ranks[0] for ranks in hosts]
    measure = _Measure(world, QUICK if quick else SECONDS)
    found = dict[tuple[int, int], Pair]()
    for matches in tournament(len(hosts))[:MATCHES] if quick else _one_by_one(len(hosts)):
        for (a, b), pair in zip(matches, measure.pairs([(speakers[a], speakers[b]) for a, b in matches])):
            found[a, b] = pair
            say(f"hosts {a} and {b}: {Link(pair.there, pair.latency).told()}")
    for pair in [] if quick else _links(hosts, found, None).pairs:  # or somebody else was on the way: asked once more
        a, b = map(int, pair.split("-"))
        found[a, b] = found[a, b].better(measure.pairs([(speakers[a], speakers[b])])[0])
    shared = next((ranks for ranks in hosts if len(ranks) > 1), None)
    within = measure.pairs([(shared[0], shared[1])])[0] if shared else None
    links = _links(hosts, found, within)
    if len(speakers) > 2 and not quick:
        nbytes = _some(links)
        links = _contended(links, nbytes, measure.around(speakers, nbytes))
    links = dataclasses.replace(links, window=measure.window(speakers))
    about = {"backend": kind_of(world.device).backend.rpartition(":")[2], "date": datetime.date.today().isoformat()}
    return dataclasses.replace(links, measured=about)


def tournament(size: int) -> list[list[tuple[int, int]]]:
    """Every pair once, in rounds in which nobody is in two: one stays, the others go round."""
    seats = [*range(size), *([-1] if size % 2 else [])]
    rounds = list[list[tuple[int, int]]]()
    for _ in range(len(seats) - 1):
        pairs = zip(seats[: len(seats) // 2], seats[::-1])
        rounds.append([(min(pair), max(pair)) for pair in pairs if min(pair) >= 0])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _one_by_one(size: int) -> list[list[tuple[int, int]]]:
    return [[pair] for pair in itertools.combinations(range(size), 2)]


def _hosts(world: World) -> list[list[int]]:
    """The ranks of every host, in rank order. Unusable where hosts have different numbers of them."""
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(world.agree(_this_host())):
        hosts.setdefault(name, []).append(rank)
    counts = {len(ranks) for ranks in hosts.values()}
    if len(counts) > 1:
        told = ", ".join(str(len(ranks)) for ranks in hosts.values())
        raise Unusable(f"hosts have different numbers of ranks ({told}): start as many on each", everywhere=True)
    return list(hosts.values())


def _this_host() -> str:
    """Where two ranks say the same, no network lies between them."""
    words = [platform.node()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/net"):
        try:
            words.append(str(Path(path).readlink()) if "/ns/" in path else Path(path).read_text().strip())
        except OSError:
            continue
    return json.dumps(words)


def _packet() -> float:
    """Bytes of numbers in a packet on the way to rank 0; inf where it is on this host, or the system (Linux) keeps it
    to itself."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:  # sends nothing
            s.connect(meeting_point(os.environ))
            local = s.getsockname()[0] == s.getpeername()[0]
            return math.inf if local else s.getsockopt(socket.IPPROTO_IP, IP_MTU) - HEADERS
    except (OSError, Unusable):
        return math.inf


def _links(hosts: Sequence[Sequence[int]], found: Mapping[tuple[int, int], Pair], within: Pair | None) -> Links:
    """Ports as fast as their fastest pair, and an entry for every pair that is slower, or further."""
    n, inside = len(hosts), WITHIN if within is None else Link(min(within.there, within.back), within.latency)
    base = Links(hosts=n, ranks_per_host=len(hosts[0]), up=inside.bandwidth, latency=inside.latency, within=inside)
    if n == 1:
        return base
    way = {(a, b): p.there for (a, b), p in found.items()} | {(b, a): p.back for (a, b), p in found.items()}
    up = [max(rate for (a, _), rate in way.items() if a == host) for host in range(n)]
    down = [max(rate for (_, b), rate in way.items() if b == host) for host in range(n)]
    latency = statistics.median(pair.latency for pair in found.values())
    both = [p.both / min(p.there, p.back) for p in found.values()]
    slower = {
        f"{a}-{b}": Link(min(p.there, p.back), p.latency)
        for (a, b), p in found.items()
        if p.there < OWN_ENTRY * min(up[a], down[b])
        or p.back < OWN_ENTRY * min(up[b], down[a])
        or abs(p.latency - latency) > max(SAME * latency, 1e-4)
    }
    return dataclasses.replace(
        base, up=up, down=down, latency=latency, pairs=slower, both_ways=min(1.0, statistics.median(both))
    )


def _some(links: Links) -> int:
    """Bytes that take the slowest port long enough."""
    slowest = min(min(links.port(host)) for host in range(links.hosts))
    return int(min(MOST, max(FIRST, slowest * max(SECONDS, 20 * (links.latency or 0)))))


def _contended(links: Links, nbytes: int, seconds: Sequence[float]) -> Links:
    """What is left of the rates where all hosts send to the next at once, which took each so long."""
    left = list[float]()
    for host, took in enumerate(seconds):
        ways = (links.between(host, (host + 1) % links.hosts), links.between((host - 1) % links.hosts, host))
        alone = max(2 * link.latency + nbytes / (links.both_ways * link.bandwidth) for link in ways)
        left.append(alone / took)
    return dataclasses.replace(links, contention=min(1.0, statistics.median(left)))


class _Measure:
    """What some ranks do while the others wait at the next meeting."""

    def __init__(self, world: World, seconds: float):
        self.world, self.rank, self.group, self.seconds = world, world.rank, world.everyone, seconds

    def pairs(self, matches: Sequence[tuple[int, int]]) -> list[Pair]:
        """What lies between two ranks each, at the same time; all ranks call this."""
        told = [0.0] * 4
        for a, b in matches:
            if self.rank in (a, b):
                other, first = (b, True) if self.rank == a else (a, False)
                swap = self._swap(other)
                ways = ((first, not first), (not first, first), (True, True))
                told = [swap / 2, *(self._rate(other, swap, *way) for way in ways)]
        rows = self._told(told)
        return [Pair(*rows[a]) for a, _ in matches]

    def around(self, ranks: Sequence[int], nbytes: int) -> list[float]:
        """Seconds that each of some ranks takes to send so much to the next and hear as much from the one before, while
        all of them do."""
        tell, hear = dict[int, Tensor](), dict[int, Tensor]()
        if self.rank in ranks:
            place = ranks.index(self.rank)
            tell[ranks[(place + 1) % len(ranks)]] = self._blank(nbytes)
            hear[ranks[place - 1]] = self._blank(nbytes)
        seconds = 0.0
        for _ in range(2):  # the first opens windows
            self._told([0.0])
            seconds = self._timed(tell, hear)
        told = self._told([seconds])
        return [told[rank][0] for rank in ranks]

    def window(self, ranks: Sequence[int]) -> int | None:
        """Bytes of the first ten packets between some ranks; None where no system says so."""
        packets = [row[0] for row in self._told([_packet()])]
        shortest = min(packets[rank] for rank in ranks)
        return None if shortest == math.inf else FIRST_PACKETS * round(shortest)

    def _swap(self, other: int) -> float:
        """Seconds of a short swap: there and back, since a message leaves when it has been asked for."""
        times = [self._timed(*self._both(other, SHORT)) for _ in range(ROUNDS)]
        return self._longer(other, statistics.median(times[1:]))

    def _rate(self, other: int, swap: float, tells: bool, hears: bool) -> float:
        """Bytes a second of messages that grow until one takes long enough for the links' windows to open."""
        nbytes, enough = FIRST, max(self.seconds, 10 * swap)
        while True:
            tell = {other: self._blank(nbytes if tells else SHORT)}
            hear = {other: self._blank(nbytes if hears else SHORT)}
            self._timed(*self._both(other, SHORT))  # begin together
            seconds = self._longer(other, self._timed(tell, hear))
            if seconds >= enough or nbytes >= MOST:
                return nbytes / max(seconds - swap, seconds / 2)
            nbytes = min(MOST, nbytes * max(2, min(16, int(1.2 * enough / seconds) + 1)))

    def _longer(self, other: int, seconds: float) -> float:
        """The longer of what both have measured, so that both go on alike."""
        mine, theirs = (torch.tensor([value], dtype=torch.float64, device=self.world.device) for value in (seconds, 0))
        self.group.swap({other: mine}, {other: theirs}).wait()
        return max(float(mine), float(theirs))

    def _both(self, other: int, nbytes: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return {other: self._blank(nbytes)}, {other: self._blank(nbytes)}

    def _blank(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.world.device)

    def _timed(self, tell: Mapping[int, Tensor], hear: Mapping[int, Tensor]) -> float:
        """Seconds until what is told has left and what is heard is here."""
        start = time.perf_counter()
        self.group.swap(tell, hear).wait()
        kind_of(self.world.device).synchronize(self.world.device)
        return time.perf_counter() - start

    def _told(self, row: Sequence[float]) -> list[list[float]]:
        """Everyone's row, in rank order."""
        rows, work = self.group.gather(torch.tensor(row, dtype=torch.float64, device=self.world.device))
        work.wait()
        return rows.tolist()
