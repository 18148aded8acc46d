"""State the figures of docs/measurements/learning_cost.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, quality_row
from benchmarks.quality.images_needed import measured_tables

PAGE = Page(
    "docs/measurements/learning_cost.md",
    not_measured={
        "(a period of 2 is just outside": "a setting",
        "A factor of 1.29 says that the baseline needed 1 / 1.29 of": "an example",
        "with 8 rounds than with 2": "settings",
        "rounds** are within the seeds of one of 8": "a setting",
        "than the period of 32 itself": "a setting",
        "and with 128 diversity suffers": "a setting",
        "worst seed counts as 1.": "a definition",
    },
)


@PAGE.states("quality_digits_periods", "quality_fashion_periods")
def periods(digits: Any, fashion: Any) -> Iterator[Statement]:
    for result, fd in ((digits, ".3f"), (fashion, ".2f")):
        for case, scores in result["cases"].items():
            yield quality_row(case, scores, result["cases"]["sync"], fd)


@PAGE.states("quality_digits_outer", "quality_fashion_outer", "quality_digits_periods", "quality_fashion_periods")
def long_periods(digits: Any, fashion: Any, digits_sync: Any, fashion_sync: Any) -> Iterator[Statement]:
    for result, baseline, fd in ((digits, digits_sync, ".3f"), (fashion, fashion_sync, ".2f")):
        for case, scores in result["cases"].items():
            yield quality_row(case, scores, baseline["cases"]["sync"], fd)


@PAGE.states(
    *("quality_digits_batches", "quality_fashion_batches", "quality_digits_gossip4", "quality_fashion_gossip4"),
    *("quality_digits_async", "quality_fashion_async", "quality_digits_lags"),
    *("quality_digits_sync", "quality_fashion_sync", "quality_digits_outer", "quality_fashion_outer"),
)
def images_needed(*_: Any) -> Iterator[Statement]:
    tables = measured_tables()
    for mode, factors in tables["PERIOD_FACTORS"].items():
        for period in sorted(factors)[1:]:
            yield f"| `sync_mode={mode}` | a period of {period} | {{:.2f}} |", factors[period]
    for delay, factor in list(tables["DELAY_FACTORS"].items())[1:]:
        yield f"| `delay` | {delay} rounds, of a period of 32 | {{:.2f}} |", factor
    for ranks in (4, 8):
        yield f"| gossip | {ranks} ranks | {{:.2f}} |", tables["GOSSIP_FACTORS"][ranks]
    for age, factor in tables["TEAM_FACTORS"].items():
        yield f"| async | the opponent's mean age: {age:g} rounds | {{:.2f}} |", factor
    for wire, factor in tables["WIRE_FACTORS"].items():
        yield f"| a wire | `{wire}` | {{:.2f}} |", factor
