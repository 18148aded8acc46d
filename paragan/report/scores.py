"""The scores of a run. Scores are comparable if they have the same name and the same protocol."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paragan.core.jsonl import Row, is_number, kimg_and_values, score_priority
from paragan.report import number_format

LOWER_IS_BETTER = {"fid", "kid", "cmmd", "mmd", "swd", "ppl", "fd", "mel", "stft"}
HIGHER_IS_BETTER = {"is", "inception", "precision", "recall", "density", "coverage", "accuracy", "cas", "psnr"}
SWEEP_ENTRIES = ("truncation", "seed")  # the scores of one sweep differ in these


@dataclass(frozen=True)
class RecordedProtocol:
    """How scores were computed. Two protocols are equal if all entries and the fingerprint are."""

    number: int  # in order of appearance, from 1
    entries: Mapping[str, str]  # readable name -> value
    fingerprint: str

    @property
    def label(self) -> str:
        return f"P{self.number}"

    def describe(self, exclude: "RecordedProtocol | None" = None) -> str:
        """Return the entries in a line, without hashes and without the entries of `exclude`."""
        excluded = exclude.entries if exclude else {}
        shown = [name for name in self.entries if name not in excluded and not name.endswith("hash")]
        return ", ".join(f"{name} {self.entries[name]}" for name in shown)

    def differences(self, other: "RecordedProtocol", ignore: Sequence[str] = SWEEP_ENTRIES) -> list[str]:
        """Return what makes scores not comparable with those of `other`: `["generated 10,000, not 50,000"]`."""
        names = self._differing_entries(other)
        if not names and self.fingerprint != other.fingerprint:
            return ["fingerprint"]
        return [
            f"{name} {self.entries.get(name, 'not recorded')}, not {other.entries.get(name, 'recorded')}"
            for name in names
            if name not in ignore
        ]

    def sweep_label(self, other: "RecordedProtocol") -> str:
        """Return how this protocol differs from `other` within one sweep: "truncation 0.5"."""
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
    """One value of a score."""

    kimg: float
    value: float  # nan where it was not finite
    seconds: float | None
    notes: str
    per_class: Mapping[str, float] = field(default_factory=dict[str, float])  # nan where it was not finite


@dataclass(frozen=True)
class ScoreSeries:
    """The scores of one name and protocol, ordered by kimg."""

    name: str
    protocol: RecordedProtocol
    scores: tuple[RecordedScore, ...]
    differences: tuple[str, ...]  # from the first protocol of this name that make scores not comparable
    sweep_label: str  # difference from the first protocol of this name within a sweep
    is_current: bool  # has the latest score of this name (see score_priority)

    @property
    def last(self) -> RecordedScore:
        return self.scores[-1]

    def incomparable_with(self, other: "ScoreSeries") -> list[str]:
        """Return the differences of protocol that make the scores of two runs not comparable."""
        return self.protocol.differences(other.protocol, ignore=("seed",))

    @property
    def direction(self) -> str | None:
        return score_direction(self.name)

    @property
    def best(self) -> RecordedScore | None:
        """The best finite score, or None if the direction is not known."""
        finite = [score for score in self.scores if math.isfinite(score.value)]
        if not finite or self.direction is None:
            return None
        choose = min if self.direction == "lower" else max
        return choose(finite, key=lambda score: score.value)


def score_direction(name: str) -> str | None:
    """Return whether "lower" or "higher" values of a score are better; None for an unknown name."""
    for word in re.findall("[a-z]+", name.lower()):
        if word in LOWER_IS_BETTER:
            return "lower"
        if word in HIGHER_IS_BETTER:
            return "higher"
    return None


def group_scores(rows: Sequence[Row], known_protocols: dict[str, RecordedProtocol] | None = None) -> list[ScoreSeries]:
    """Group rows of metrics.jsonl into series of one name and protocol, names in order of appearance.

    known_protocols: protocols that have a number already; new ones are added to it.
    """
    known_protocols = {} if known_protocols is None else known_protocols
    by_name: dict[str, dict[str, list[Row]]] = {}
    latest: dict[str, tuple[Any, str]] = {}  # name -> (rank, key of the protocol)
    for i, row in enumerate(rows):
        name = number_format.format_value(row.get("name", "unnamed"))
        key = _protocol_key(row)
        known_protocols.setdefault(key, _parse_protocol(len(known_protocols) + 1, row))
        by_name.setdefault(name, {}).setdefault(key, []).append(row)
        kimg = row.get("kimg")
        rank = (kimg if is_number(kimg) else -math.inf, *score_priority(row), i)
        latest[name] = max(latest.get(name, (rank, key)), (rank, key))
    result: list[ScoreSeries] = []
    for name, by_protocol in by_name.items():
        first = known_protocols[next(iter(by_protocol))]
        for key, protocol_rows in by_protocol.items():
            protocol = known_protocols[key]
            scores = tuple(sorted(_parse_scores(protocol_rows), key=lambda score: score.kimg))
            if scores:
                result.append(
                    ScoreSeries(
                        name,
                        protocol,
                        scores,
                        differences=tuple(protocol.differences(first)),
                        sweep_label=protocol.sweep_label(first),
                        is_current=key == latest[name][1],
                    )
                )
    return result


def shared_protocol(protocols: Sequence[RecordedProtocol]) -> RecordedProtocol:
    """Return the entries that all of these protocols share."""
    entries = protocols[0].entries if protocols else {}
    same = {name: value for name, value in entries.items() if all(p.entries.get(name) == value for p in protocols)}
    return RecordedProtocol(0, same, "")


def unique_protocols(score_series: Iterable[ScoreSeries]) -> list[RecordedProtocol]:
    """Return every protocol once, in order of appearance."""
    return sorted({one.protocol.number: one.protocol for one in score_series}.values(), key=lambda p: p.number)


def _protocol_key(row: Row) -> str:
    return json.dumps([row.get("fingerprint"), row.get("protocol")], sort_keys=True, default=str)


def _parse_protocol(number: int, row: Row) -> RecordedProtocol:
    protocol = row.get("protocol")
    if not isinstance(protocol, Mapping):
        protocol = {"protocol": protocol} if protocol else {}
    return RecordedProtocol(number, dict(number_format.flat_labels(protocol)), str(row.get("fingerprint") or ""))


def _parse_scores(rows: Iterable[Row]) -> Iterable[RecordedScore]:
    for row in rows:
        for kimg, value in zip(*kimg_and_values([row], "value")):
            seconds = row.get("seconds")
            notes = row.get("notes") or ""
            if isinstance(notes, list):
                notes = "; ".join(map(str, notes))
            yield RecordedScore(
                kimg,
                value,
                seconds if is_number(seconds) else None,
                number_format.format_value(notes),
                dict(_parse_class_scores(row.get("per_class"))),
            )


def _parse_class_scores(class_scores: Any) -> Iterable[tuple[str, float]]:
    if isinstance(class_scores, Mapping):
        for name, value in class_scores.items():
            yield number_format.format_value(str(name)), float(value) if is_number(value) else math.nan
