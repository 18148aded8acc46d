"""State the figures of docs/measurements/gossip.md, and of docs/gossip.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, laboratory, quality_row
from benchmarks.quality.images_needed import on_both, worst_factor

PAGE = Page(
    "docs/measurements/gossip.md",
    not_measured={
        "A ring all-reduce of eight ranks is 14 hops of 20 ms": "arithmetic of hops",
        "(Until 2026-11-24 this page said 8.2 times, against alternating training.)": "the former claim",
        "(CP-OAdam: 0 to 4)": "seeds",
        "With both rates times 2.8, the square root of 8,": "settings",
    },
)
GUIDE = Page("docs/gossip.md")


@PAGE.states("gossip_lab")
def speed(lab: Any) -> Iterator[Statement]:
    sync, baseline, *rows = laboratory(lab, "100 Mbit/s")
    yield "| sync, exact | {:.0f} | {:.2f} | 1 |", sync["step_ms"], baseline["step_ms"] / sync["step_ms"]
    yield "| CP-OAdam, exact | {:.0f} | 1 | 1 |", baseline["step_ms"]
    for row in rows:
        faster, limit = (baseline[key] / row[key] for key in ("step_ms", "sent_bytes"))
        spec = ".2f" if row["wire"] == "exact" else ".1f"
        text = f"| gossip, one-peer, {row['wire']} | {{:.0f}} | {{:{spec}}} | {{:{spec}}} |"
        yield text, row["step_ms"], faster, limit
    sync, baseline, *rows = laboratory(lab, "200 Mbit/s, 20 ms, 100k parameters")
    yield "| sync, exact | {:.0f} | {:.2f} | 1 |", sync["step_ms"], baseline["step_ms"] / sync["step_ms"]
    yield "| CP-OAdam, exact | {:.0f} | 1 | {:.1f} |", baseline["step_ms"], sync["step_ms"] / baseline["step_ms"]
    for row in rows:
        faster = [other["step_ms"] / row["step_ms"] for other in (baseline, sync)]
        yield f"| gossip, one-peer, {row['wire']} | {{:.0f}} | {{:.1f}} | {{:.1f}} |", row["step_ms"], *faster
    even = laboratory(lab, "100 Mbit/s, computing 0.5 s, 500k parameters")
    uneven = laboratory(lab, "one link of 10 Mbit/s, the same")
    for label, one, other in zip(("sync, exact", "CP-OAdam, exact", "async-gossip, ring, exact"), even, uneven):
        kept = 100 * one["step_ms"] / other["step_ms"]
        yield f"| {label} | {{:.0f}} | {{:.0f}} | {{:.0f}} % |", one["step_ms"], other["step_ms"], kept
    yield "takes as long as {:.1f} MB at 10 Mbit/s", uneven[0]["sent_bytes"] / 1e6


@PAGE.states("quality_digits_gossip4", "quality_digits_gossip8", "quality_fashion_gossip4", "quality_fashion_gossip8")
def quality(digits4: Any, digits8: Any, fashion4: Any, fashion8: Any) -> Iterator[Statement]:
    for four, eight, fd in ((digits4, digits8, ".3f"), (fashion4, fashion8, ".2f")):
        baseline = four["cases"]["CP-OAdam"]
        for case in ("CP-OAdam", "sync"):
            yield quality_row(case, four["cases"][case], baseline, fd)
        for ranks, result in ((4, four), (8, eight)):
            for case in ("one-peer", "ring", "random-ring"):
                yield quality_row(f"{ranks} ranks, {case}", result["cases"][case], baseline, fd)
    yield quality_row("4 ranks, one-peer, int8", digits4["cases"]["one-peer, int8"], digits4["cases"]["CP-OAdam"])
    factors = [worst_factor(on_both(f"gossip{ranks}", "one-peer"), ("gossip4", "CP-OAdam")) for ranks in (4, 8)]
    yield "needs up to {:.2f} and {:.2f} times the images", *factors
    cases = fashion8["cases"]
    faster = "CP-OAdam, both rates times 2.8"
    yield quality_row(faster, cases[faster], None, ".2f")
    yield quality_row(
        "8 ranks, one-peer, both rates times 2.8", cases["one-peer, both rates times 2.8"], cases[faster], ".2f"
    )


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


@GUIDE.states("gossip_lab")
def speed_of_a_step(lab: Any) -> Iterator[Statement]:
    _, baseline, exact, int8 = laboratory(lab, "200 Mbit/s, 20 ms, 100k parameters")
    faster = [baseline["step_ms"] / row["step_ms"] for row in (exact, int8)]
    yield "a step is {:.1f} times faster than that of CP-OAdam", faster[0]
    yield "over int8, {:.1f} times faster", faster[1]


@GUIDE.states("quality_digits_gossip4", "quality_digits_gossip8", "quality_fashion_gossip4", "quality_fashion_gossip8")
def images_needed(digits4: Any, digits8: Any, fashion4: Any, fashion8: Any) -> Iterator[Statement]:
    factors = [worst_factor(on_both(f"gossip{ranks}", "one-peer"), ("gossip4", "CP-OAdam")) for ranks in (4, 8)]
    yield "up to {:.2f} times as many on four ranks, and {:.2f} on eight", *factors
