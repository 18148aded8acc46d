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

from paragan.core.errors import UsageError
from paragan.core.schema import config_class, from_dict, from_yaml, to_yaml

BYTES_PER_UNIT = {"bit": 1 / 8, "b": 1 / 8, "B": 1.0, "byte": 1.0, "bytes": 1.0}
SI_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
SECONDS_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
MIN_BYTES_PER_S, MAX_BYTES_PER_S, MAX_LATENCY_S = (
    0.01,
    1e13,
    600.0,
)  # bytes a second, seconds: beyond, somebody mistyped
RATE_EXAMPLES, TIME_EXAMPLES = "25 Gbit/s, 200 Mbit/s and 3 GB/s work", "50 us and 10 ms work"
MAX_HOSTS, MAX_RANKS_PER_HOST = 10_000_000, 1024  # ranks of a host


def parse_rate(value: Any) -> float:
    """'25 Gbit/s' -> bytes a second. A number is bytes a second as it is."""
    found = re.fullmatch(r"([0-9.eE+-]+) *([kKMGT]?)(bit|b|B|bytes?)(?:/s|ps)", str(value).strip())
    amount = (
        _parse_number(found[1]) * SI_PREFIXES[found[2]] * BYTES_PER_UNIT[found[3]] if found else _parse_number(value)
    )
    if not MIN_BYTES_PER_S <= amount <= MAX_BYTES_PER_S:
        raise ValueError(f"a rate is above 0, and not beyond reason, with its unit; {RATE_EXAMPLES}")
    return amount


def parse_duration(value: Any) -> float:
    """'50 us' -> seconds. A number is seconds as it is."""
    found = re.fullmatch(r"([0-9.eE+-]+) *(s|ms|us|µs|ns)", str(value).strip())
    amount = _parse_number(found[1]) * SECONDS_PER_UNIT[found[2]] if found else _parse_number(value)
    if not 0 <= amount <= MAX_LATENCY_S:
        raise ValueError(f"a latency is 0 or more, at most {MAX_LATENCY_S:g} s, with its unit; {TIME_EXAMPLES}")
    return amount


def _parse_number(text: Any) -> float:
    try:
        return float(text) if not isinstance(text, bool) else math.nan
    except (TypeError, ValueError, OverflowError):
        return math.nan  # no bound holds for it


def format_rate(amount: float) -> str:
    """Bytes a second, in bits."""
    bits = 8 * amount
    unit = next((u for u in ("T", "G", "M", "k") if bits >= SI_PREFIXES[u]), "")
    return f"{bits / SI_PREFIXES[unit]:.4g} {unit}bit/s"


def format_duration(seconds: float) -> str:
    unit = next((u for u in ("s", "ms", "us") if seconds >= SECONDS_PER_UNIT[u]), "ns")
    return f"{seconds / SECONDS_PER_UNIT[unit]:.4g} {unit}"


@dataclasses.dataclass(frozen=True)
class Link:
    """One way between two ranks: bytes a second, and seconds that a short message takes."""

    bandwidth: float
    latency: float

    def transfer_s(self, nbytes: float) -> float:
        """How long so much is under way where nothing else is."""
        return self.latency + nbytes / self.bandwidth

    def describe(self) -> str:
        return f"{format_rate(self.bandwidth)}, {format_duration(self.latency)}"


def _parse_link(value: Any) -> Any:
    if isinstance(value, Link):
        return value
    words = [word.strip() for word in str(value).split(",")]
    if len(words) != 2:
        raise ValueError("a link is a rate and a latency: '25 Gbit/s, 50 us' works")
    return Link(parse_rate(words[0]), parse_duration(words[1]))


def _parse_rates(value: Any) -> Any:
    return [parse_rate(one) for one in value] if isinstance(value, list | tuple) else parse_rate(value)


RateField = Annotated[float | list[float], BeforeValidator(_parse_rates)]
SecondsField = Annotated[float, BeforeValidator(parse_duration)]
LinkField = Annotated[Link, BeforeValidator(_parse_link)]
FractionField = Annotated[float, Field(gt=0, le=1)]
DEFAULT_INTRA_HOST_LINK = Link(10e9, 10e-6)


@config_class
class Links:
    """Hosts and what lies between them. Rates in bytes a second, latencies in seconds."""

    hosts: Annotated[int, Field(ge=1, le=MAX_HOSTS)]
    up: RateField | None = None
    down: RateField | None = None
    latency: SecondsField | None = None
    ranks_per_host: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_HOST)] = 1
    intra_host: LinkField = DEFAULT_INTRA_HOST_LINK
    duplex_efficiency: FractionField = 1.0
    contention_efficiency: FractionField = 1.0
    initial_window_bytes: Annotated[int, Field(ge=1)] | None = None
    pairs: Mapping[str, LinkField] = dataclasses.field(default_factory=dict[str, Link])
    measurement: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        for name in ("up", "down"):
            rates = getattr(self, name)
            if isinstance(rates, list) and len(rates) != self.hosts:
                raise ValueError(f"{name} has {len(rates)} rates for {self.hosts} hosts: give one of all, or one each")
        for pair in self.pairs:
            _parse_pair(pair, self.hosts)
        if (self.up is None or self.latency is None) and (missing := self._missing_pair()):
            raise ValueError(f"pairs lacks {missing}: add it, or up and latency of those that have no entry")

    def _missing_pair(self) -> str:
        there = {_parse_pair(pair, self.hosts) for pair in self.pairs}
        if self.hosts * (self.hosts - 1) // 2 == len(there):
            return ""
        return next(f"{a}-{b}" for a in range(self.hosts) for b in range(a + 1, self.hosts) if (a, b) not in there)

    @property
    def ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def port_rates(self, host: int) -> tuple[float, float]:
        """Bytes a second (up, down) that a host's ranks share; unbounded where only pairs are known."""
        up = self.up if self.up is not None else math.inf
        down = self.down if self.down is not None else up
        return _host_rate(up, host), _host_rate(down, host)

    def link_between(self, a: int, b: int) -> Link:
        """From host a to host b, where nothing else is under way."""
        if a == b:
            return self.intra_host
        bound = min(self.port_rates(a)[0], self.port_rates(b)[1])
        own = self.pairs.get(f"{min(a, b)}-{max(a, b)}")
        if own:
            return Link(min(own.bandwidth, bound), own.latency)
        assert self.latency is not None
        return Link(bound, self.latency)

    def describe(self) -> str:
        """One line."""
        if self.hosts == 1:
            return f"1 host, {self.ranks_per_host} ranks, {self.intra_host.describe()} between them"
        ups, downs = zip(*(self.port_rates(host) for host in range(min(self.hosts, 64))))
        ends = " to ".join(dict.fromkeys(format_rate(r) for r in (min(ups), max(ups)) if math.isfinite(r)))
        down = "" if ups == downs else f" up, {format_rate(min(downs))} down"
        own = f", {len(self.pairs)} pairs of their own" if self.pairs else ""
        latency = "" if self.latency is None else f", {format_duration(self.latency)}"
        each = f" of {self.ranks_per_host} ranks" if self.ranks_per_host > 1 else ""
        return f"{self.hosts} hosts{each}{', ' if ends else ''}{ends}{down}{latency}{own}"


def _host_rate(rates: float | list[float], host: int) -> float:
    return rates[host] if isinstance(rates, list) else rates


def _parse_pair(pair: str, hosts: int) -> tuple[int, int]:
    found = re.fullmatch(r"(0|[1-9][0-9]*)-([1-9][0-9]*)", str(pair))
    if not found or not int(found[1]) < int(found[2]) < hosts:
        raise ValueError(f"pairs has {pair!r}: a pair is two hosts, the smaller first, 0-1 to {hosts - 2}-{hosts - 1}")
    return int(found[1]), int(found[2])


# by hand ----------------------------------------------------------------------------------------------


def parse_links(text: str) -> Links:
    """Links from one line: '8 hosts, 25 Gbit/s, 50 us', '4 hosts of 8 ranks, ...', '... 100/20 Mbit/s' (down/up)."""
    form = r"(\d{1,9}) hosts?(?: of (\d{1,9}) ranks?)?, *(?:([0-9.]+)/)?([0-9.]+ *[a-zA-Z]+/s), *([0-9.]+ *[a-zµ]+)"
    found = re.fullmatch(form, text.strip())
    if not found:
        raise UsageError(
            f"links: {text[:200]!r} is not understood; '8 hosts, 25 Gbit/s, 50 us' works, and so does a file"
        )
    hosts, ranks, down, up, latency = found.groups()
    unit = re.sub(r"^[0-9.]+ *", "", up)
    data = {"hosts": int(hosts), "ranks_per_host": int(ranks or 1), "up": up, "latency": latency}
    return from_dict(Links, data | ({"down": f"{down} {unit}"} if down else {}))


def load_links(text: str) -> Links:
    """What a user gives: a file, or one line."""
    return read_links(Path(text)) if is_links_file(text) else parse_links(text)


def is_links_file(text: str) -> bool:
    return Path(text).suffix in (".yaml", ".yml", ".json")


# files ------------------------------------------------------------------------------------------------


def read_links(path: Path) -> Links:
    """Fields, or the one line. Unusable names the file, the field and what fits."""
    try:
        text = path.read_text("utf-8")
        return parse_links(text) if text[:1].isdigit() else from_dict(Links, from_yaml(text, str(path)))
    except FileNotFoundError as error:
        raise UsageError(f"links: {path} does not exist; `paragan bench links --out {path}` measures them") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"links: {path} cannot be read: {error}") from error
    except UsageError as error:
        raise UsageError(f"links: {path}: {error}") from error


def links_to_yaml(links: Links) -> str:
    """The file, with units."""
    data: dict[str, Any] = {"hosts": links.hosts, "ranks_per_host": links.ranks_per_host}
    for name in ("up", "down"):
        if (rates := getattr(links, name)) is not None:
            data[name] = [format_rate(r) for r in rates] if isinstance(rates, list) else format_rate(rates)
    if links.latency is not None:
        data["latency"] = format_duration(links.latency)
    data["within"] = links.intra_host.describe()
    data |= {"both_ways": round(links.duplex_efficiency, 3), "contention": round(links.contention_efficiency, 3)}
    if links.initial_window_bytes is not None:
        data["window"] = links.initial_window_bytes
    if links.pairs:
        data["pairs"] = {pair: link.describe() for pair, link in links.pairs.items()}
    return to_yaml(data | ({"measured": dict(links.measurement)} if links.measurement else {}))
