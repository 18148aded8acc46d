"""The scores of a run, and which of them may be compared: those of one name under one protocol."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paragan.core.jsonl import Row, is_number, kimg_and_values, score_priority
from paragan.report import number_format

LOWER_IS_BETTER = {"fid", "kid", "cmmd", "mmd", "swd", "ppl", "fd"}
HIGHER_IS_BETTER = {"is", "inception", "precision", "recall", "density", "coverage", "accuracy", "cas"}
SWEEP_ENTRIES = ("truncation", "seed")  # which images of a model were scored: lines of one sweep differ in these


@dataclass(frozen=True)
class RecordedProtocol:
    """How scores were taken. Two are the same if nothing in them differs, their fingerprint included."""

    number: int  # in order of appearance, from 1
    entries: Mapping[str, str]  # in words
    fingerprint: str

    @property
    def label(self) -> str:
        return f"P{self.number}"

    def describe(self, exclude: "RecordedProtocol | None" = None) -> str:
        """What a reader wants to know first: all but hashes, and but what `without` says already."""
        said = exclude.entries if exclude else {}
        return ", ".join(
            f"{name} {value}" for name, value in self.entries.items() if name not in said and not name.endswith("hash")
        )

    def differences(self, other: "RecordedProtocol", ignore: Sequence[str] = SWEEP_ENTRIES) -> list[str]:
        """What forbids to compare with `other`, in words: `["generated 10,000, not 50,000"]`."""
        names = self._differing_entries(other)
        if not names and self.fingerprint != other.fingerprint:
            return ["fingerprint"]
        return [
            f"{name} {self.entries.get(name, 'not recorded')}, not {other.entries.get(name, 'recorded')}"
            for name in names
            if name not in ignore
        ]

    def sweep_label(self, other: "RecordedProtocol") -> str:
        """Where it stands in a sweep that `other` is of too: "truncation 0.5"."""
        return ", ".join(
            f"{name} {self.entries.get(name, 'not recorded')}"
            for name in self._differing_entries(other)
            if name in SWEEP_ENTRIES
        )

    def _differing_entries(self, other: "RecordedProtocol") -> list[str]:
        names = {**self.entries, **other.entries}
        return [name for name in names if self.entries.get(name) != other.entries.get(name)]


@dataclass(frozen=True)
class RecordedScore:
    kimg: float
    value: float  # nan where it was not finite
    seconds: float | None
    notes: str
    per_class: Mapping[str, float] = field(default_factory=dict[str, float])  # nan where it was not finite


@dataclass(frozen=True)
class ScoreSeries:
    """The scores of one name under one protocol, in the order of kimg."""

    name: str
    protocol: RecordedProtocol
    scores: tuple[RecordedScore, ...]
    differences: tuple[str, ...]  # from the first protocol under this name, so that they may not be compared
    sweep_label: str  # where it stands in a sweep with that one
    is_current: bool  # the protocol of the score that is shown where one is: of the last moment, of most weight

    @property
    def last(self) -> RecordedScore:
        return self.scores[-1]

    @property
    def direction(self) -> str | None:
        return score_direction(self.name)

    @property
    def best(self) -> RecordedScore | None:
        finite = [score for score in self.scores if math.isfinite(score.value)]
        if not finite or self.direction is None:
            return None
        pick = min if self.direction == "lower" else max
        return pick(finite, key=lambda score: score.value)


def score_direction(name: str) -> str | None:
    """Which values of a score are, lower or higher ones; None for a name that we do not know."""
    first = next(
        (word for word in re.findall("[a-z]+", name.lower()) if word in LOWER_IS_BETTER | HIGHER_IS_BETTER), None
    )
    return None if first is None else "lower" if first in LOWER_IS_BETTER else "higher"


def group_scores(rows: Sequence[Row], known_protocols: dict[str, RecordedProtocol] | None = None) -> list[ScoreSeries]:
    """Rows of metrics.jsonl, put beside what they may be compared with; names in order of appearance. known: protocols
    that have a number already, to which new ones are added."""
    known_protocols = {} if known_protocols is None else known_protocols
    by_name: dict[str, dict[str, list[Row]]] = {}
    shown: dict[str, tuple[Any, str]] = {}
    for place, row in enumerate(rows):
        name, key = number_format.format_value(row.get("name", "unnamed")), _protocol_key(row)
        known_protocols.setdefault(key, _parse_protocol(len(known_protocols) + 1, row))
        by_name.setdefault(name, {}).setdefault(key, []).append(row)
        at = row.get("kimg")
        rank = (at if is_number(at) else -math.inf, *score_priority(row), place)
        shown[name] = max(shown.get(name, (rank, key)), (rank, key))
    found = []
    for name, by_protocol in by_name.items():
        first = known_protocols[next(iter(by_protocol))]
        for key, members in by_protocol.items():
            scores = tuple(sorted(_parse_scores(members), key=lambda score: score.kimg))
            differs, swept = tuple(known_protocols[key].differences(first)), known_protocols[key].sweep_label(first)
            if scores:
                found.append(
                    ScoreSeries(name, known_protocols[key], scores, differs, swept, is_current=key == shown[name][1])
                )
    return found


def shared_protocol(protocols: Sequence[RecordedProtocol]) -> RecordedProtocol:
    """What several protocols have in common, to be said once."""
    entries = protocols[0].entries if protocols else {}
    same = {name: value for name, value in entries.items() if all(p.entries.get(name) == value for p in protocols)}
    return RecordedProtocol(0, same, "")


def unique_protocols(score_series: Iterable[ScoreSeries]) -> list[RecordedProtocol]:
    """Every protocol once, in order of appearance."""
    return sorted({one.protocol.number: one.protocol for one in score_series}.values(), key=lambda p: p.number)


def _protocol_key(row: Row) -> str:
    return json.dumps([row.get("fingerprint"), row.get("protocol")], sort_keys=True, default=str)


def _parse_protocol(number: int, row: Row) -> RecordedProtocol:
    protocol = row.get("protocol")
    entries = protocol if isinstance(protocol, Mapping) else {"protocol": protocol} if protocol else {}
    return RecordedProtocol(number, dict(number_format.flat_labels(entries)), str(row.get("fingerprint") or ""))


def _parse_scores(rows: Iterable[Row]) -> Iterable[RecordedScore]:
    for row in rows:
        for kimg, value in zip(*kimg_and_values([row], "value")):
            seconds = row.get("seconds")
            yield RecordedScore(
                kimg,
                value,
                seconds if is_number(seconds) else None,
                number_format.format_value(
                    "; ".join(map(str, notes)) if isinstance(notes := row.get("notes"), list) else notes or ""
                ),
                dict(_parse_class_scores(row.get("per_class"))),
            )


def _parse_class_scores(class_scores: Any) -> Iterable[tuple[str, float]]:
    for name, value in class_scores.items() if isinstance(class_scores, Mapping) else ():
        yield number_format.format_value(str(name)), float(value) if is_number(value) else math.nan
