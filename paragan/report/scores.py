"""The scores of a run, and which of them may be compared: those of one name under one protocol."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paragan.core.jsonl import Row, columns, is_number, weight
from paragan.report import number_format

LOWER = {"fid", "kid", "cmmd", "mmd", "swd", "ppl", "fd"}
HIGHER = {"is", "inception", "precision", "recall", "density", "coverage", "accuracy", "cas"}
SWEPT = ("truncation", "seed")  # which images of a model were scored: lines of one sweep differ in these


@dataclass(frozen=True)
class Protocol:
    """How scores were taken. Two are the same if nothing in them differs, their fingerprint included."""

    number: int  # in order of appearance, from 1
    entries: Mapping[str, str]  # in words
    fingerprint: str

    @property
    def label(self) -> str:
        return f"P{self.number}"

    def words(self, without: "Protocol | None" = None) -> str:
        """What a reader wants to know first: all but hashes, and but what `without` says already."""
        said = without.entries if without else {}
        return ", ".join(
            f"{name} {value}" for name, value in self.entries.items() if name not in said and not name.endswith("hash")
        )

    def differences(self, other: "Protocol", but: Sequence[str] = SWEPT) -> list[str]:
        """What forbids to compare with `other`, in words: `["generated 10,000, not 50,000"]`."""
        names = self._differing(other)
        if not names and self.fingerprint != other.fingerprint:
            return ["fingerprint"]
        return [
            f"{name} {self.entries.get(name, 'not recorded')}, not {other.entries.get(name, 'recorded')}"
            for name in names
            if name not in but
        ]

    def swept(self, other: "Protocol") -> str:
        """Where it stands in a sweep that `other` is of too: "truncation 0.5"."""
        return ", ".join(
            f"{name} {self.entries.get(name, 'not recorded')}" for name in self._differing(other) if name in SWEPT
        )

    def _differing(self, other: "Protocol") -> list[str]:
        names = {**self.entries, **other.entries}
        return [name for name in names if self.entries.get(name) != other.entries.get(name)]


@dataclass(frozen=True)
class Score:
    kimg: float
    value: float  # nan where it was not finite
    seconds: float | None
    notes: str
    per_class: Mapping[str, float] = field(default_factory=dict[str, float])  # nan where it was not finite


@dataclass(frozen=True)
class Series:
    """The scores of one name under one protocol, in the order of kimg."""

    name: str
    protocol: Protocol
    scores: tuple[Score, ...]
    differs: tuple[str, ...]  # from the first protocol under this name, so that they may not be compared
    swept: str  # where it stands in a sweep with that one
    current: bool  # the protocol of the score that is shown where one is: of the last moment, of most weight

    @property
    def last(self) -> Score:
        return self.scores[-1]

    @property
    def better(self) -> str | None:
        return which_is_better(self.name)

    @property
    def best(self) -> Score | None:
        finite = [score for score in self.scores if math.isfinite(score.value)]
        if not finite or self.better is None:
            return None
        pick = min if self.better == "lower" else max
        return pick(finite, key=lambda score: score.value)


def which_is_better(name: str) -> str | None:
    """Which values of a score are, lower or higher ones; None for a name that we do not know."""
    first = next((word for word in re.findall("[a-z]+", name.lower()) if word in LOWER | HIGHER), None)
    return None if first is None else "lower" if first in LOWER else "higher"


def series(rows: Sequence[Row], known: dict[str, Protocol] | None = None) -> list[Series]:
    """Rows of metrics.jsonl, put beside what they may be compared with; names in order of appearance. known: protocols
    that have a number already, to which new ones are added."""
    known = {} if known is None else known
    by_name: dict[str, dict[str, list[Row]]] = {}
    shown: dict[str, tuple[Any, str]] = {}
    for place, row in enumerate(rows):
        name, key = number_format.value(row.get("name", "unnamed")), _identity(row)
        known.setdefault(key, _protocol(len(known) + 1, row))
        by_name.setdefault(name, {}).setdefault(key, []).append(row)
        at = row.get("kimg")
        rank = (at if is_number(at) else -math.inf, *weight(row), place)
        shown[name] = max(shown.get(name, (rank, key)), (rank, key))
    found = []
    for name, by_protocol in by_name.items():
        first = known[next(iter(by_protocol))]
        for key, members in by_protocol.items():
            scores = tuple(sorted(_scores(members), key=lambda score: score.kimg))
            differs, swept = tuple(known[key].differences(first)), known[key].swept(first)
            if scores:
                found.append(Series(name, known[key], scores, differs, swept, current=key == shown[name][1]))
    return found


def shared(known: Sequence[Protocol]) -> Protocol:
    """What several protocols have in common, to be said once."""
    entries = known[0].entries if known else {}
    same = {name: value for name, value in entries.items() if all(p.entries.get(name) == value for p in known)}
    return Protocol(0, same, "")


def protocols(measured: Iterable[Series]) -> list[Protocol]:
    """Every protocol once, in order of appearance."""
    return sorted({one.protocol.number: one.protocol for one in measured}.values(), key=lambda p: p.number)


def _identity(row: Row) -> str:
    return json.dumps([row.get("fingerprint"), row.get("protocol")], sort_keys=True, default=str)


def _protocol(number: int, row: Row) -> Protocol:
    protocol = row.get("protocol")
    entries = protocol if isinstance(protocol, Mapping) else {"protocol": protocol} if protocol else {}
    return Protocol(number, dict(number_format.entries(entries)), str(row.get("fingerprint") or ""))


def _scores(rows: Iterable[Row]) -> Iterable[Score]:
    for row in rows:
        for kimg, value in zip(*columns([row], "value")):
            seconds = row.get("seconds")
            yield Score(
                kimg,
                value,
                seconds if is_number(seconds) else None,
                number_format.value(
                    "; ".join(map(str, notes)) if isinstance(notes := row.get("notes"), list) else notes or ""
                ),
                dict(_per_class(row.get("per_class"))),
            )


def _per_class(found: Any) -> Iterable[tuple[str, float]]:
    for name, value in found.items() if isinstance(found, Mapping) else ():
        yield number_format.value(str(name)), float(value) if is_number(value) else math.nan
