"""State the figures of docs/measurements/async.md, and of docs/async.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, by_case, laboratory, quality_row

PAGE = Page(
    "docs/measurements/async.md",
    not_measured={
        "+ 2 d forward + 4 d backward | r (g forward + 2 g backward": "counted",
        "d backward to the inputs only) | 12 |": "counted",
        "| every rank trains both | 2 d forward + 4 d backward | the same | 11 |": "counted",
        "| teams | 6 d, on the ranks of D | r (3 g + 2 d), on the ranks of G | the larger of 6 and 5 |": "counted",
        "each is busy with 6 or 5 of what would be 6 on both": "counted",
        "Below 1, one network": "a ratio of one",
        "the first row was 1.23 on 2026-11-22": "the former claim",
        "optimizers (an extrapolation of 2)": "a setting",
        "(until 2026-11-24 this page said beside 0.100, of plain Adam)": "the former claim",
        "With a period of 2 for both": "a setting",
        "1 s of emulated computing": "a setting",
        "DCGANs at 64 px in colour": "a setting",
        "`sync` with a period of 2 sends as much as the teams": "a setting",
        "need more than the machine's 24 GB": "memory of the machine",
        "A rank of D sends 150 MB of gradients (a sum over 4 ranks), so 25 MB a round are left": "arithmetic of bytes",
        "beta1 of 0 instead of the recipe's 0.5": "settings",
    },
)
GUIDE = Page("docs/async.md")


BASELINE = "sync, optimistic"
SYNC_CASES = {BASELINE: "sync, optimistic", "sync": "sync, the recipe's Adam"}
TEAM_CASES = {"batches 1:1": "async, batches 1:1", "batches 2:1": "async, batches 2:1 (`--g_batch=256`)"}
PERIOD_CASES = {
    "sync, optimistic, period 2": "sync, optimistic, `sync_period=2`",
    "batches 1:1, period 2": "async, batches 1:1, `sync_period=2`",
}
LAG_CASES = {
    "lead 2": "async, `max_lead_rounds=2`",
    "lead 4": "async, `max_lead_rounds=4`",
    "snapshots of every fourth D": "async, `snapshot_every=4`",
}


@PAGE.states("quality_digits_async", "quality_fashion_async")
def quality(digits: Any, fashion: Any) -> Iterator[Statement]:
    for result, labels, fd in (
        (digits, SYNC_CASES | TEAM_CASES | PERIOD_CASES | LAG_CASES, ".3f"),
        (fashion, SYNC_CASES | TEAM_CASES | PERIOD_CASES, ".2f"),
    ):
        for case, label in labels.items():
            count = sum(row["case"] == case for row in result["rows"])
            text, *figures = quality_row(f"{label} | {{}}", result["cases"][case], result["cases"][BASELINE], fd)
            yield text, count, *figures
    fd = [digits["cases"][case]["fd"][1] for case in ("batches 1:1", BASELINE)]
    yield "On the digits their fd is {:.3f} beside {:.3f}", *fd


@PAGE.states("quality_digits_split")
def divisions(split: Any) -> Iterator[Statement]:
    fd = by_case(split, "fd")
    two = fd["2:2, lead 2"], fd["1:3, lead 2"], fd["3:1, lead 2"]
    text = "`quality_digits_split.json`: 2:2 {:.3f}; with `max_lead_rounds=2` 2:2 {:.3f}, 1:3 {:.3f}, 3:1 {:.3f})"
    yield text, fd["2:2 (auto), lead 1"], *two


@PAGE.states("teams", "forms")
def speed(teams: Any, forms: Any) -> Iterator[Statement]:
    labels = {
        "digits, 1:1": "two ranks, digits, batches 1:1",
        "digits, 2:1": "two ranks, digits, batches 2:1",
        "digits, G 3 times as wide, 1:1": "two ranks, digits, G three times as wide, batches 1:1",
        "digits, G 3 times as wide, 2:1": "two ranks, the same, batches 2:1",
        "digits, G 3 times as wide, 1:4": "two ranks, the same, batches 1:4",
        "digits": "one process, digits",
        "digits, G 3 times as wide": "one process, digits, G three times as wide",
        "fashion": "one process, fashion",
    }
    for name, case in (teams["cases"] | forms["cases"]).items():
        text = f"| {labels[name]} | {{:.1f}} | {{:.2f}} | {{:.2f}} ({{:.2f}} to {{:.2f}}) |"
        figures = [case["g_over_d"], case["counted_speedup"], *case["measured_speedup"]]
        if name in teams["cases"]:
            text += " {:.2f} ({:.2f} to {:.2f}) |"
            figures += case["speedup over one process"]
        yield text, *figures


@PAGE.states("async_lab")
def slow_links(lab: Any) -> Iterator[Statement]:
    sync, fourth, second = laboratory(lab, "1 Gbit/s, 50M parameters, computing 1 s")
    again, period = laboratory(lab, "the same, sync with the bytes of the teams")
    text = "the kernel counted {:.0f}, {:.0f} and {:.0f} MB"
    yield text, *(row["kernel_bytes"] / 1e6 for row in (sync, fourth, second))
    yield "| sync | {:.0f} | | {:.1f} MB |", sync["step_ms"], sync["sent_bytes"] / 1e6
    for label, row, baseline in (
        ("sync, `sync_period=2`", period, again),
        ("async, 4 and 4 ranks, `snapshot_every=4`", fourth, sync),
        ("the same, `snapshot_every=2`, `snapshot_wire=bf16`", second, sync),
    ):
        figures = row["step_ms"], baseline["step_ms"] / row["step_ms"], row["sent_bytes"] / 1e6
        yield f"| {label} | {{:.0f}} | {{:.2f}} times as fast | {{:.1f}} MB |", *figures
    yield "Half of what `sync` sends is {:.0f} MB.", sync["sent_bytes"] / 2e6


@PAGE.states("team_memory")
def memory(result: Any) -> Iterator[Statement]:
    for case, row in result["cases"].items():
        ranks = len(row["bytes"]["async"])
        megabytes = [nbytes / 1e6 for nbytes in (max(row["bytes"]["sync"]), row["bytes"]["async"][0])]
        d_megabytes = row["bytes"]["async"][ranks // 2] / 1e6
        shares = 100 * row["share of sync"]["G"], 100 * row["share of sync"]["D"]
        text = f"| {case} | {{:.0f}} | {{:.0f}} ({{:.0f}} %) | {{:.0f}} ({{:.0f}} %) |"
        yield text, *megabytes, shares[0], d_megabytes, shares[1]


@PAGE.states("quality_digits_lags")
def ages(lags: Any) -> Iterator[Statement]:
    fd = by_case(lags, "fd")
    sync = lags["cases"]["alternating"]["fd"]
    text = "alternating training: {:.3f}, ten seeds from {:.3f} to {:.3f}; alternating and optimistic: {:.3f})"
    yield text, sync[1], sync[0], sync[2], fd["alternating, optimistic"]
    plain = [fd[f"{ages}, plain"] for ages in ("0, 0", "1, 0", "0, 1", "2, 0", "0, 2", "4, 0", "0, 4", "8, 0")]
    yield "| without extrapolation | {:.3f} | {:.2f}, {:.2f} | {:.2f}, {:.2f} | {:.2f}, {:.2f} | {:.2f} | |", *plain
    ages = ("0, 0", "1, 0", "0, 1", "2, 0", "0, 2", "1, 1", "4, 0", "0, 4", "2, 2", "8, 0", "0, 8", "16, 0", "0, 16")
    text = (
        "| extrapolation 2 | {:.3f} | {:.3f}, {:.3f} | {:.3f}, {:.3f}, {:.3f} | {:.2f}, {:.2f}, {:.2f} "
        "| {:.2f}, {:.2f} | {:.2f}, {:.2f} |"
    )
    yield text, *(fd[age] for age in ages)
    replay = fd["0, 0"], fd["0, 0, replay"], fd["0, 0, replay a half"], fd["0, 0, uniform"]
    yield "`latest` {:.3f}, `replay` {:.3f}, with `fraction=0.5` {:.3f}, `uniform` {:.3f}.", *replay


@PAGE.states("quality_digits_ahead")
def extrapolation(ahead: Any) -> Iterator[Statement]:
    fd = by_case(ahead, "fd")
    pairs = [fd[f"{age}, ahead {by}"] for by in ("1", "1.5", "2") for age in ("0, 0", "1, 0")]
    text = (
        "fd at ages 0 and 1: 1 gives {:.3f} and {:.3f}, 1.5 gives {:.3f} and {:.3f}, 2 gives {:.3f} and {:.3f}; "
        "at age 1, 2.5 gives {:.3f} and 3 gives {:.3f}."
    )
    yield text, *pairs, fd["1, 0, ahead 2.5"], fd["1, 0, ahead 3"]
    yield "improves alternating training to {:.3f},", fd["alternating, beta1 0"]
    text = "an age of 1 without extrapolation from {:.2f} to {:.3f}, and with an extrapolation of 1 to {:.3f}."
    yield text, fd["1, 0"], fd["1, 0, beta1 0"], fd["1, 0, ahead 1 beta1 0"]


@GUIDE.states("teams", "quality_digits_async")
def speed_and_quality(teams: Any, digits: Any) -> Iterator[Statement]:
    yield "play a round of the digits {:.2f} times faster", teams["cases"]["digits, 1:1"]["measured_speedup"][0]
    fd = [digits["cases"][case]["fd"][1] for case in ("batches 1:1", BASELINE)]
    yield "end at an fd of {:.3f}, `sync` with the same optimizers at {:.3f}", *fd
