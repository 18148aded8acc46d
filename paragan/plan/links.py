"""The links between hosts: how many bytes a second, and how long a message is under way.

    links = described("8 hosts, 25 Gbit/s, 50 us")       # by hand; "100000 hosts, 100/20 Mbit/s, 40 ms": down / up
    links = read_links(Path("links.yaml"))               # as `paragan bench links` measured them, or by hand
    links.between(0, 3)                                  # Link(bandwidth=3.1e9, latency=5e-05)

A host has a port, with a rate up and a rate down that its ranks share; what passes between two hosts goes through
both ports, after a latency. A pair that is slower than its ports has an entry of its own. The file:

    hosts: 4
    ranks_per_host: 1
    up: 200 Mbit/s                # of every host, or a list
    down: 200 Mbit/s
    latency: 10 ms                # one way, of a short message
    within: 3.1 GB/s, 20 us       # between ranks of one host
    both_ways: 0.98               # the share of a port's rates that is left where it sends and receives at once
    contention: 0.95              # and where all hosts do
    window: 14480                 # bytes that a connection sends at once after a rest (TCP's slow start); or left out
    pairs: {0-3: "20 Mbit/s, 40 ms"}
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paragan.core.errors import Unusable
from paragan.core.schema import build, from_yaml, record, to_yaml

BITS = {"bit": 1 / 8, "b": 1 / 8, "B": 1.0, "byte": 1.0, "bytes": 1.0}
PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
SLOWEST, FASTEST, LONGEST = 0.01, 1e13, 600.0  # bytes a second, seconds: beyond, somebody mistyped
RATE_WORKS, TIME_WORKS = "25 Gbit/s, 200 Mbit/s and 3 GB/s work", "50 us and 10 ms work"
MOST_HOSTS, MOST_RANKS = 10_000_000, 1024  # ranks of a host


def rate(value: Any) -> float:
    """'25 Gbit/s' -> bytes a second. A number is bytes a second as it is."""
    found = re.fullmatch(r"([0-9.eE+-]+) *([kKMGT]?)(bit|b|B|bytes?)(?:/s|ps)", str(value).strip())
    amount = _number(found[1]) * PREFIX[found[2]] * BITS[found[3]] if found else _number(value)
    if not SLOWEST <= amount <= FASTEST:
        raise ValueError(f"a rate is above 0, and not beyond reason, with its unit; {RATE_WORKS}")
    return amount


def duration(value: Any) -> float:
    """'50 us' -> seconds. A number is seconds as it is."""
    found = re.fullmatch(r"([0-9.eE+-]+) *(s|ms|us|µs|ns)", str(value).strip())
    amount = _number(found[1]) * SECONDS[found[2]] if found else _number(value)
    if not 0 <= amount <= LONGEST:
        raise ValueError(f"a latency is 0 or more, at most {LONGEST:g} s, with its unit; {TIME_WORKS}")
    return amount


def _number(text: Any) -> float:
    try:
        return float(text) if not isinstance(text, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan  # no bound holds for it


def told_rate(amount: float) -> str:
    """Bytes a second, in bits."""
    bits = 8 * amount
    unit = next((u for u in ("T", "G", "M", "k") if bits >= PREFIX[u]), "")
    return f"{bits / PREFIX[unit]:.4g} {unit}bit/s"


def told_duration(seconds: float) -> str:
    unit = next((u for u in ("s", "ms", "us") if seconds >= SECONDS[u]), "ns")
    return f"{seconds / SECONDS[unit]:.4g} {unit}"


@dataclasses.dataclass(frozen=True)
class Link:
    """One way between two ranks: bytes a second, and seconds that a short message takes."""

    bandwidth: float
    latency: float

    def seconds(self, nbytes: float) -> float:
        """How long so much is under way where nothing else is."""
        return self.latency + nbytes / self.bandwidth

    def told(self) -> str:
        return f"{told_rate(self.bandwidth)}, {told_duration(self.latency)}"


def _link(value: Any) -> Any:
    if isinstance(value, Link):
        return value
    words = [word.strip() for word in str(value).split(",")]
    if len(words) != 2:
        raise ValueError("a link is a rate and a latency: '25 Gbit/s, 50 us' works")
    return Link(rate(words[0]), duration(words[1]))


def _rates(value: Any) -> Any:
    return [rate(one) for one in value] if isinstance(value, list | tuple) else rate(value)


Rates = Annotated[float | list[float], BeforeValidator(_rates)]
Seconds = Annotated[float, BeforeValidator(duration)]
OneLink = Annotated[Link, BeforeValidator(_link)]
Part = Annotated[float, Field(gt=0, le=1)]
WITHIN = Link(10e9, 10e-6)


@record
class Links:
    """Hosts and what lies between them. Rates in bytes a second, latencies in seconds."""

    hosts: Annotated[int, Field(ge=1, le=MOST_HOSTS)]
    up: Rates | None = None
    down: Rates | None = None
    latency: Seconds | None = None
    ranks_per_host: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1
    within: OneLink = WITHIN
    both_ways: Part = 1.0
    contention: Part = 1.0
    window: Annotated[int, Field(ge=1)] | None = None
    pairs: Mapping[str, OneLink] = dataclasses.field(default_factory=dict[str, Link])
    measured: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            rates = getattr(self, name)
            if isinstance(rates, list) and len(rates) != self.hosts:
                raise ValueError(f"{name} has {len(rates)} rates for {self.hosts} hosts: give one of all, or one each")
        for pair in self.pairs:
            _ends(pair, self.hosts)
        if (self.up is None or self.latency is None) and (missing := self._missing()):
            raise ValueError(f"pairs lacks {missing}: add it, or up and latency of those that have no entry")

    def _missing(self) -> str:
        there = {_ends(pair, self.hosts) for pair in self.pairs}
        if self.hosts * (self.hosts - 1) // 2 == len(there):
            return ""
        return next(f"{a}-{b}" for a in range(self.hosts) for b in range(a + 1, self.hosts) if (a, b) not in there)

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def port(self, host: int) -> tuple[float, float]:
        """Bytes a second (up, down) that a host's ranks share; unbounded where only pairs are known."""
        up = self.up if self.up is not None else math.inf
        down = self.down if self.down is not None else up
        return _of(up, host), _of(down, host)

    def between(self, a: int, b: int) -> Link:
        """From host a to host b, where nothing else is under way."""
        if a == b:
            return self.within
        bound = min(self.port(a)[0], self.port(b)[1])
        own = self.pairs.get(f"{min(a, b)}-{max(a, b)}")
        if own:
            return Link(min(own.bandwidth, bound), own.latency)
        assert self.latency is not None
        return Link(bound, self.latency)

    def told(self) -> str:
        """One line."""
        if self.hosts == 1:
            return f"1 host, {self.ranks_per_host} ranks, {self.within.told()} between them"
        ups, downs = zip(*(self.port(host) for host in range(min(self.hosts, 64))))
        ends = " to ".join(dict.fromkeys(told_rate(r) for r in (min(ups), max(ups)) if math.isfinite(r)))
        down = "" if ups == downs else f" up, {told_rate(min(downs))} down"
        own = f", {len(self.pairs)} pairs of their own" if self.pairs else ""
        latency = "" if self.latency is None else f", {told_duration(self.latency)}"
        each = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{self.hosts} hosts{each}{', ' if ends else ''}{ends}{down}{latency}{own}"


def _of(rates: float | list[float], host: int) -> float:
    return rates[host] if isinstance(rates, list) else rates


def _ends(pair: str, hosts: int) -> tuple[int, int]:
    found = re.fullmatch(r"(0|[1-9][0-9]*)-([1-9][0-9]*)", str(pair))
    if not found or not int(found[1]) < int(found[2]) < hosts:
        raise ValueError(f"pairs has {pair!r}: a pair is two hosts, the smaller first, 0-1 to {hosts - 2}-{hosts - 1}")
    return int(found[1]), int(found[2])


# by hand ----------------------------------------------------------------------------------------------


def described(text: str) -> Links:
    """Links from one line: '8 hosts, 25 Gbit/s, 50 us', '4 hosts of 8 ranks, ...', '... 100/20 Mbit/s' (down/up)."""
    form = r"(\d{1,9}) hosts?(?: of (\d{1,9}) ranks?)?, *(?:([0-9.]+)/)?([0-9.]+ *[a-zA-Z]+/s), *([0-9.]+ *[a-zµ]+)"
    found = re.fullmatch(form, text.strip())
    if not found:
        raise Unusable(
            f"links: {text[:200]!r} is not understood; '8 hosts, 25 Gbit/s, 50 us' works, and so does a file"
        )
    hosts, ranks, down, up, latency = found.groups()
    unit = re.sub(r"^[0-9.]+ *", "", up)
    data = {"hosts": int(hosts), "ranks_per_host": int(ranks or 1), "up": up, "latency": latency}
    return build(Links, data | ({"down": f"{down} {unit}"} if down else {}))


def links_from(text: str) -> Links:
    """What a user gives: a file, or one line."""
    return read_links(Path(text)) if is_file(text) else described(text)


def is_file(text: str) -> bool:
    return Path(text).suffix in (".yaml", ".yml", ".json")


# files ------------------------------------------------------------------------------------------------


def read_links(path: Path) -> Links:
    """Fields, or the one line. Unusable names the file, the field and what fits."""
    try:
        text = path.read_text("utf-8")
        return described(text) if text[:1].isdigit() else build(Links, from_yaml(text, str(path)))
    except FileNotFoundError as error:
        raise Unusable(f"links: {path} does not exist; `paragan bench links --out {path}` measures them") from error
    except (OSError, UnicodeDecodeError) as error:
        raise Unusable(f"links: {path} cannot be read: {error}") from error
    except Unusable as error:
        raise Unusable(f"links: {path}: {error}") from error


def written_links(links: Links) -> str:
    """The file, with units."""
    data: dict[str, Any] = {"hosts": links.hosts, "ranks_per_host": links.ranks_per_host}
    for name in ("up", "down"):
        if (rates := getattr(links, name)) is not None:
            data[name] = [told_rate(r) for r in rates] if isinstance(rates, list) else told_rate(rates)
    if links.latency is not None:
        data["latency"] = told_duration(links.latency)
    data["within"] = links.within.told()
    data |= {"both_ways": round(links.both_ways, 3), "contention": round(links.contention, 3)}
    if links.window is not None:
        data["window"] = links.window
    if links.pairs:
        data["pairs"] = {pair: link.told() for pair, link in links.pairs.items()}
    return to_yaml(data | ({"measured": dict(links.measured)} if links.measured else {}))
