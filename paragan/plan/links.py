"""Bandwidth and latency of the links between hosts.

    links = parse_links("8 hosts, 25 Gbit/s, 50 us")     # or "100000 hosts, 100/20 Mbit/s, 40 ms": down / up
    links = read_links(Path("links.yaml"))               # as `paragan bench links` measured them, or written by hand
    links.link_between(0, 3)                             # Link(bandwidth=3.1e9, latency=5e-05)

Each host has one port. Its upload and download rates are shared by the ranks of the host. A message between two hosts
passes through both ports, after a latency. A pair that is slower than its ports has its own entry. The file:

    hosts: 4
    ranks_per_host: 1
    up: 200 Mbit/s                # one rate for all hosts, or a list with one per host
    down: 200 Mbit/s              # default: as `up`
    latency: 10 ms                # of a short message, one way
    intra_host: 3.1 GB/s, 20 us   # between ranks of one host
    duplex_efficiency: 0.98       # fraction of the rates that remains when a port sends and receives at once
    contention_efficiency: 0.95   # fraction that remains when all hosts send at once
    initial_window_bytes: 14480   # sent at once on an idle connection (TCP slow start); default: no slow start
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
MIN_BYTES_PER_S, MAX_BYTES_PER_S = 0.01, 1e13  # a rate outside these bounds is a typing error
MAX_LATENCY_S = 600.0
MAX_HOSTS = 10_000_000
MAX_RANKS_PER_HOST = 1024


def parse_rate(value: Any) -> float:
    """Parse a rate such as "25 Gbit/s" to bytes per second. A plain number is bytes per second.

    Raises:
        ValueError: it is not a rate, or outside MIN_BYTES_PER_S..MAX_BYTES_PER_S.
    """
    match = re.fullmatch(r"([0-9.eE+-]+) *([kKMGT]?)(bit|b|B|bytes?)(?:/s|ps)", str(value).strip())
    if match:
        rate = _parse_number(match[1]) * SI_PREFIXES[match[2]] * BYTES_PER_UNIT[match[3]]
    else:
        rate = _parse_number(value)
    if not MIN_BYTES_PER_S <= rate <= MAX_BYTES_PER_S:
        raise ValueError("a rate must be above 0 and have a unit. Use 25 Gbit/s, 200 Mbit/s or 3 GB/s")
    return rate


def parse_duration(value: Any) -> float:
    """Parse a duration such as "50 us" to seconds. A plain number is seconds.

    Raises:
        ValueError: it is not a duration, or outside 0..MAX_LATENCY_S.
    """
    match = re.fullmatch(r"([0-9.eE+-]+) *(s|ms|us|µs|ns)", str(value).strip())
    seconds = _parse_number(match[1]) * SECONDS_PER_UNIT[match[2]] if match else _parse_number(value)
    if not 0 <= seconds <= MAX_LATENCY_S:
        raise ValueError(f"a latency must be from 0 to {MAX_LATENCY_S:g} s and have a unit. Use 50 us or 10 ms")
    return seconds


def _parse_number(text: Any) -> float:
    """Return NaN, which fails every comparison, for what is no number."""
    if isinstance(text, bool):
        return math.nan
    try:
        return float(text)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def format_rate(bytes_per_s: float) -> str:
    """Format a rate in bits per second: "25 Gbit/s"."""
    bits = 8 * bytes_per_s
    unit = next((u for u in ("T", "G", "M", "k") if bits >= SI_PREFIXES[u]), "")
    return f"{bits / SI_PREFIXES[unit]:.4g} {unit}bit/s"


def format_duration(seconds: float) -> str:
    """Format a duration in s, ms, us or ns: "50 us"."""
    unit = next((u for u in ("s", "ms", "us") if seconds >= SECONDS_PER_UNIT[u]), "ns")
    return f"{seconds / SECONDS_PER_UNIT[unit]:.4g} {unit}"


@dataclasses.dataclass(frozen=True)
class Link:
    """One direction between two ranks."""

    bandwidth: float  # bytes per second
    latency: float  # seconds of a short message

    def describe(self) -> str:
        """Return it as users write it: "25 Gbit/s, 50 us"."""
        return f"{format_rate(self.bandwidth)}, {format_duration(self.latency)}"


def _parse_link(value: Any) -> Any:
    if isinstance(value, Link):
        return value
    words = [word.strip() for word in str(value).split(",")]
    if len(words) != 2:
        raise ValueError("a link is a rate and a latency. Use '25 Gbit/s, 50 us'")
    return Link(parse_rate(words[0]), parse_duration(words[1]))


def _parse_rates(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [parse_rate(rate) for rate in value]
    return parse_rate(value)


RateField = Annotated[float | list[float], BeforeValidator(_parse_rates)]
SecondsField = Annotated[float, BeforeValidator(parse_duration)]
LinkField = Annotated[Link, BeforeValidator(_parse_link)]
FractionField = Annotated[float, Field(gt=0, le=1)]
DEFAULT_INTRA_HOST_LINK = Link(10e9, 10e-6)


@config_class
class Links:
    """Hosts and the links between them; the module docstring explains the fields.

    Rates are in bytes per second, latencies in seconds. `measurement` says how the links were measured.
    """

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
                raise ValueError(f"{name} has {len(rates)} rates for {self.hosts} hosts. Use one rate, or one per host")
        for pair in self.pairs:
            _parse_pair(pair, self.hosts)
        if self.up is None or self.latency is None:
            missing = self._missing_pair()
            if missing:
                raise ValueError(f"pairs lacks {missing}. Add it, or give up and latency for pairs without an entry")

    def _missing_pair(self) -> str:
        """Return the first pair without an entry, or "" if there is none."""
        entries = {_parse_pair(pair, self.hosts) for pair in self.pairs}
        if self.hosts * (self.hosts - 1) // 2 == len(entries):
            return ""
        return next(f"{a}-{b}" for a in range(self.hosts) for b in range(a + 1, self.hosts) if (a, b) not in entries)

    @property
    def ranks(self) -> int:
        """Ranks of all hosts."""
        return self.hosts * self.ranks_per_host

    def port_rates(self, host: int) -> tuple[float, float]:
        """Return (up, down) in bytes per second of a host's port; infinity if only pairs are known."""
        up = self.up if self.up is not None else math.inf
        down = self.down if self.down is not None else up
        return _host_rate(up, host), _host_rate(down, host)

    def link_between(self, a: int, b: int) -> Link:
        """Return the link from host a to host b, without other traffic."""
        if a == b:
            return self.intra_host
        bound = min(self.port_rates(a)[0], self.port_rates(b)[1])
        entry = self.pairs.get(f"{min(a, b)}-{max(a, b)}")
        if entry:
            return Link(min(entry.bandwidth, bound), entry.latency)
        assert self.latency is not None
        return Link(bound, self.latency)

    def describe(self) -> str:
        """Summarize the links in one line."""
        if self.hosts == 1:
            return f"1 host, {self.ranks_per_host} ranks, {self.intra_host.describe()} between them"
        ups, downs = zip(*(self.port_rates(host) for host in range(min(self.hosts, 64))))
        text = f"{self.hosts} hosts"
        if self.ranks_per_host > 1:
            text += f" of {self.ranks_per_host} ranks"
        rates = " to ".join(dict.fromkeys(format_rate(r) for r in (min(ups), max(ups)) if math.isfinite(r)))
        if rates:
            text += f", {rates}"
        if ups != downs:
            text += f" up, {format_rate(min(downs))} down"
        if self.latency is not None:
            text += f", {format_duration(self.latency)}"
        if self.pairs:
            text += f", {len(self.pairs)} slower pairs"
        return text


def _host_rate(rates: float | list[float], host: int) -> float:
    return rates[host] if isinstance(rates, list) else rates


def _parse_pair(pair: str, hosts: int) -> tuple[int, int]:
    match = re.fullmatch(r"(0|[1-9][0-9]*)-([1-9][0-9]*)", str(pair))
    if not match or not int(match[1]) < int(match[2]) < hosts:
        raise ValueError(
            f"pairs has {pair!r}, which is no pair of hosts. Use 0-1 to {hosts - 2}-{hosts - 1}, the smaller host first"
        )
    return int(match[1]), int(match[2])


def parse_links(text: str) -> Links:
    """Parse one line: "8 hosts, 25 Gbit/s, 50 us", "4 hosts of 8 ranks, ...", "... 100/20 Mbit/s ..." (down/up).

    Raises:
        UsageError: the line has another form, or a value is out of range.
    """
    form = r"(\d{1,9}) hosts?(?: of (\d{1,9}) ranks?)?, *(?:([0-9.]+)/)?([0-9.]+ *[a-zA-Z]+/s), *([0-9.]+ *[a-zµ]+)"
    match = re.fullmatch(form, text.strip())
    if not match:
        raise UsageError(f"--links {text[:200]!r}: is not understood. Use a file, or '8 hosts, 25 Gbit/s, 50 us'")
    hosts, ranks, down, up, latency = match.groups()
    unit = re.sub(r"^[0-9.]+ *", "", up)
    data = {"hosts": int(hosts), "ranks_per_host": int(ranks or 1), "up": up, "latency": latency}
    if down:
        data["down"] = f"{down} {unit}"
    return from_dict(Links, data)


def load_links(text: str) -> Links:
    """Read a file if `text` names one, else parse it as one line."""
    return read_links(Path(text)) if is_links_file(text) else parse_links(text)


def is_links_file(text: str) -> bool:
    """Return whether `text` names a YAML or JSON file."""
    return Path(text).suffix in (".yaml", ".yml", ".json")


def read_links(path: Path) -> Links:
    """Read a file with fields, or with one line.

    Raises:
        UsageError: names the file and what is wrong in it.
    """
    try:
        text = path.read_text("utf-8")
        return parse_links(text) if text[:1].isdigit() else from_dict(Links, from_yaml(text, str(path)))
    except FileNotFoundError as error:
        raise UsageError(f"--links {path}: does not exist. Use `paragan bench links --out {path}`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--links {path} cannot be read: {error}") from error
    except UsageError as error:
        raise UsageError(f"--links {path}: {error}") from error


def links_to_yaml(links: Links) -> str:
    """Format links as the text of a file, with units."""
    data: dict[str, Any] = {"hosts": links.hosts, "ranks_per_host": links.ranks_per_host}
    for name in ("up", "down"):
        rates = getattr(links, name)
        if isinstance(rates, list):
            data[name] = [format_rate(rate) for rate in rates]
        elif rates is not None:
            data[name] = format_rate(rates)
    if links.latency is not None:
        data["latency"] = format_duration(links.latency)
    data["intra_host"] = links.intra_host.describe()
    data["duplex_efficiency"] = round(links.duplex_efficiency, 3)
    data["contention_efficiency"] = round(links.contention_efficiency, 3)
    if links.initial_window_bytes is not None:
        data["initial_window_bytes"] = links.initial_window_bytes
    if links.pairs:
        data["pairs"] = {pair: link.describe() for pair, link in links.pairs.items()}
    if links.measurement:
        data["measurement"] = dict(links.measurement)
    return to_yaml(data)
