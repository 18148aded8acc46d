"""State the figures of docs/measurements/prediction.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/prediction.md",
    not_measured={
        "0 to 50 ms": "settings",
        "above 0 ms a relay": "a setting",
        "a token bucket passes 128 KB": "a property of Linux",
        "whose shortest timeout is 200 ms": "a property of TCP",
        "or within 5 % of it": "the target",
        "All errors above 10 %": "the target",
        "400 ms of computing": "a setting",
        "Above 100 %": "a limit",
        "on 1, 2 and 4 ranks": "settings",
    },
)


@PAGE.states("prediction", "prediction_again")
def errors(first: Any, second: Any) -> Iterator[Statement]:
    summaries = first["summary"], second["summary"]
    yield "| configurations | 40 | {} | {} |", *(summary["configurations"] for summary in summaries)
    yield "| median error | 10 % | {:.1f} % | {:.1f} % |", *(100 * summary["median_error"] for summary in summaries)
    yield "| worst error | 25 % | {:.1f} % | {:.1f} % |", *(100 * summary["worst_error"] for summary in summaries)
    within = [sum(abs(row["error"]) <= most for row in one["rows"]) for one in (first, second) for most in (0.1, 0.25)]
    yield "| within 10 % / within 25 % | | {} / {} | {} / {} |", *within
    yield "| 9 of 10 | {} | {} |", *(summary["choices_right"] for summary in summaries)
    errors = [
        {(row["network"], row["strategy"]): -100 * row["error"] for row in one["rows"]} for one in (first, second)
    ]
    duplex = [one["found"]["links"]["duplex_efficiency"] for one in first["laboratories"].values()]
    yield "both directions at once reach {:.2f} to {:.2f} of the rate", min(duplex), max(duplex)
    pair = [error["2 hosts, 200 Mbit/s, 10 ms", f"sync+{wire}"] for error in errors for wire in ("bf16", "int8")]
    yield "at 10 ms ({:.0f} to {:.0f} % in both measurements)", min(pair), max(pair)
    slow = [error["4 hosts, 20 Mbit/s, 1 ms", "sync+int8"] for error in errors]
    yield "`int8` at 20 Mbit/s ({:.0f} and {:.0f} %)", *slow
    fast = errors[0]["2 hosts, 1 Gbit/s", "quantized+sign"]
    eight = errors[0]["8 hosts, 50 Mbit/s, 2 ms", "sync+int4"]
    yield "between eight hosts ({:.0f} and {:.0f} % in the first)", fast, eight


@PAGE.states("prediction_scaling")
def efficiency(scaling: Any) -> Iterator[Statement]:
    names = {"async+lead=2": "async+max_lead_rounds=2"}
    rows = [scaling["hosts"][hosts]["rows"] for hosts in ("2", "4", "8")]
    for of_hosts in zip(*rows):
        strategy = of_hosts[0]["strategy"]
        figures = [100 * row[key] for row in of_hosts for key in ("measured", "predicted")]
        cells = " | ".join(["{:.0f}% ({:.0f}%)"] * 3)
        yield f"| {names.get(strategy, strategy)} | {cells} |", *figures


@PAGE.states("auto")
def choices_of_auto(auto: Any) -> Iterator[Statement]:
    one, two, four = auto["rows"]
    again, _, later_two, later_four = auto["again"]

    def ms(row: Any) -> list[float]:
        return sorted(1000 * seconds for seconds in row["seconds"].values())

    yield "fastest and chosen ({:.1f} ms a round, `sync` {:.1f})", *ms(one)
    yield "({:.1f} ms, the next {:.1f})", *ms(four)[:2]
    yield "and {:.1f} % slower than one of them when all ran afterwards", 100 * two["slower"]
    yield (
        "are within {:.0f} % there ({:.1f} to {:.1f} ms)",
        100 * (ms(again)[4] / ms(again)[0] - 1),
        ms(again)[0],
        ms(again)[4],
    )
    yield "strategies {:.1f} and {:.1f} % slower", 100 * later_two["slower"], 100 * later_four["slower"]
    figures = [ms_of for row in (later_two, later_four) for ms_of in (1000 * row["seconds"][row["chosen"]], ms(row)[0])]
    yield "({:.1f} and {:.1f} ms, {:.1f} and {:.1f})", *figures


@PAGE.states("prediction_own")
def own_parts(result: Any) -> Iterator[Statement]:
    for row in result["rows"]:
        text = f"| {row['network']} | {row['strategy']} | {{:.0f}} | {{:.0f}} | {{:+.1f}} % |"
        yield text, row["measured_ms"], row["predicted_ms"], 100 * row["error"]
