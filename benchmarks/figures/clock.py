"""State the figures of docs/measurements/clock.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.figures.registry import Page, Statement

SLOW_LINK = "20 Mbit/s, 50 ms"
BEST = "period 32, 4 fragments, delay 8, int4"
PAGE = Page(
    "docs/measurements/clock.md",
    not_measured={
        "50 ms": "a setting",
        "100 ms": "a setting",
        "1 ms": "a setting",
        "0.7": "a setting",
        "0.9": "a setting",
        "--jobs 2` or 1": "settings",
        "32 rounds": "a setting",
        "8 rounds": "a setting",
    },
)


@PAGE.states("clock_digits")
def digits(result: Any) -> Iterator[Statement]:
    lines = result["summary"]
    for link in dict.fromkeys(line["link"] for line in lines):
        at_link = [line for line in lines if line["link"] == link]
        baseline = next(line for line in at_link if line["way"] == "sync")
        for line in at_link:
            yield row_of(line, baseline)
    yield "{:.1f} times sooner and with {:.0f} times fewer bytes", *best_over_sync(result)
    sync_s, best_s = (slow_round_s(result, way) for way in ("sync", BEST))
    yield "what is left of the {:.0f} times that a round is shorter", sync_s / best_s
    yield "no worse than {:.3f}", lines[0]["target"]
    errors = [abs(median_of(line, "error")) for line in lines]
    yield "{:.1f} % in the median and {:.0f} % at most", 100 * statistics.median(errors), 100 * max(errors)
    at_end = {(line["way"], line["link"]): median_of(line, "fd") for line in lines}
    ends = at_end["async-gossip", SLOW_LINK], at_end["gossip", SLOW_LINK]
    yield "ends at a distance of {:.3f}, where `gossip`, which waits for them, ends at {:.3f}", *ends
    yield "half a round old, and it ends at {:.3f}", at_end["async-gossip", "100 Mbit/s, 20 ms"]
    late = max(row["late_rounds"] for row in result["rows"])
    yield "at most {:.1f} % of the rounds of a run were late", 100 * late


@PAGE.states("clock_digits")
def plans(result: Any) -> Iterator[Statement]:
    for plan in result["plans"]:
        first, second = (f"`{plan[place]['strategy']}`" for place in ("first", "second"))
        start = f"| {plan['hosts']} | {plan['link']} | {first} | {{:.0f}} | {second} | {{:.0f}} | {{:.0f}} |"
        yield start, *(plan[place]["seconds"] for place in ("first", "second", "sync"))


def best_over_sync(result: Any) -> tuple[float, float]:
    """Return how many times sooner, and with how many times fewer bytes, the best way reaches the score of sync."""
    lines = {line["way"]: line for line in result["summary"] if line["link"] == SLOW_LINK}
    sync, best = lines["sync"], lines[BEST]
    sooner = median_of(sync, "seconds_to_target") / median_of(best, "seconds_to_target")
    return sooner, median_of(sync, "bytes_to_target") / median_of(best, "bytes_to_target")


def slow_round_s(result: Any, way: str) -> float:
    """Return the median seconds of a round at the slowest link."""
    runs = (run for run in result["rows"] if (run["way"], run["link"]) == (way, SLOW_LINK))
    return statistics.median(run["seconds"] / run["rounds"] for run in runs)


def row_of(line: Mapping[str, Any], baseline: Mapping[str, Any]) -> Statement:
    """Return a line of a table: final distance, seconds, megabytes; those to the target, and their ratios to sync."""
    start = f"| {line['way']} | {line['kimg']:g} | {{:.3f}} | {{:.0f}} | {{:.1f}} |"
    whole = median_of(line, "fd"), median_of(line, "seconds"), median_of(line, "sent_bytes") / 1e6
    if line["seconds_to_target"][1] is None:
        return (f"{start} never | never |", *whole)
    seconds, sent_bytes = median_of(line, "seconds_to_target"), median_of(line, "bytes_to_target")
    sooner = median_of(baseline, "seconds_to_target") / seconds
    fewer = median_of(baseline, "bytes_to_target") / sent_bytes
    return (f"{start} {{:.0f}} ({{:.1f}}) | {{:.1f}} ({{:.1f}}) |", *whole, seconds, sooner, sent_bytes / 1e6, fewer)


def median_of(line: Mapping[str, Any], name: str) -> float:
    return line[name][1]


@PAGE.states("clock_trial")
def trial(result: Any) -> Iterator[Statement]:
    (row,) = result["rows"]
    distances = {round(kimg): distance for kimg, distance, *_ in row["curve"]}
    yield "from {:.1f} at 20 kimg to {:.1f} at 160", distances[20], distances[160]
    yield "{:.0f} % of the digits are recognised", 100 * row["recognised"]
