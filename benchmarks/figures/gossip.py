"""Gossip: speed, quality, lost ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, laboratory, quality_row

PAGE = Page(
    "docs/measurements/gossip.md",
    not_measured={
        "A ring all-reduce of eight ranks is 14 hops of 20 ms": "arithmetic of hops",
        "With both rates times 2.8, the square root of 8,": "settings",
    },
)


@PAGE.states("gossip_lab")
def speed(lab: Any) -> Iterator[Statement]:
    sync, *rows = laboratory(lab, "100 Mbit/s")
    yield "| sync, exact | {:.0f} | 1 | 1 |", sync["step_ms"]
    for row in rows:
        faster, limit = (sync[key] / row[key] for key in ("step_ms", "sent_bytes"))
        spec = ".2f" if row["wire"] == "exact" else ".1f"
        text = f"| gossip, one-peer, {row['wire']} | {{:.0f}} | {{:{spec}}} | {{:{spec}}} |"
        yield text, row["step_ms"], faster, limit
    sync, *rows = laboratory(lab, "200 Mbit/s, 20 ms, 100k parameters")
    yield "| sync, exact | {:.0f} | 1 | | gossip, one-peer, exact | {:.0f} |", sync["step_ms"], rows[0]["step_ms"]
    for row in rows:
        faster = sync["step_ms"] / row["step_ms"]
        yield f"| gossip, one-peer, {row['wire']} | {{:.0f}} | {{:.1f}} |", row["step_ms"], faster
    even = laboratory(lab, "100 Mbit/s, computing 0.5 s, 500k parameters")
    uneven = laboratory(lab, "one link of 10 Mbit/s, the same")
    for label, one, other in zip(("sync, exact", "async-gossip, ring, exact"), even, uneven):
        kept = 100 * one["step_ms"] / other["step_ms"]
        yield f"| {label} | {{:.0f}} | {{:.0f}} | {{:.0f}} % |", one["step_ms"], other["step_ms"], kept
    yield "takes as long as {:.1f} MB at 10 Mbit/s", uneven[0]["sent_bytes"] / 1e6


@PAGE.states("gossip_lab")
def load(lab: Any) -> Iterator[Statement]:
    apart = lab["laboratories"]["200 Mbit/s, 20 ms, 100k parameters"]["machine"]
    loads = lab["machine"]["load_before"], apart["load_before"]
    yield "The runs began at a load of {:.0f} from other work, those at 20 ms at one of {:.0f}", *loads


@PAGE.states("quality_digits_gossip4", "quality_digits_gossip8", "quality_fashion_gossip4", "quality_fashion_gossip8")
def quality(digits4: Any, digits8: Any, fashion4: Any, fashion8: Any) -> Iterator[Statement]:
    for ranks, result, fd in ((4, digits4, ".3f"), (8, digits8, ".3f"), (4, fashion4, ".2f"), (8, fashion8, ".2f")):
        cases = result["cases"]
        yield quality_row(f"{ranks} ranks: sync", cases["sync"], cases["sync"], fd)
        for case in ("one-peer", "ring", "random-ring"):
            yield quality_row(case, cases[case], cases["sync"], fd)
    yield quality_row("one-peer, int8", digits4["cases"]["one-peer, int8"], digits4["cases"]["sync"])
    cases = fashion8["cases"]
    yield quality_row("one-peer, both rates times 2.8", cases["one-peer, rates x 2.8"], cases["sync"], ".2f")
    one = cases["CP-OAdam"]
    text = "| CP-OAdam (one seed) | {:.2f} | {:.1f} % | **{:.1f} %** |"
    yield text, one["fd"][1], 100 * one["recognised"][1], 100 * one["diversity"][1]


@PAGE.states("survive")
def lost_ranks(survive: Any) -> Iterator[Statement]:
    labels = {
        "killed-0": "rank 0, killed (SIGKILL)",
        "killed-2": "rank 2, killed (SIGKILL)",
        "frozen-0": "rank 0, frozen (SIGSTOP), then continued",
        "frozen-3": "rank 3, frozen (SIGSTOP), then continued",
        "cut-3": "rank 3, cut off (its link taken down, later up again)",
    }
    for row in survive["rows"]:
        text = f"| {labels[row['case']]} | {{:.1f}} s | {{:.1f}} % | {{:.1f}} % |"
        yield text, row["pause_s"], 100 * row["recognised"], 100 * row["diversity"]
