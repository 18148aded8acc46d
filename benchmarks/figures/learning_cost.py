"""State the figures of docs/measurements/learning_cost.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, quality_row
from benchmarks.quality.images_needed import measured_tables

PAGE = Page(
    "docs/measurements/learning_cost.md",
    not_measured={"with 8 rounds than with 2": "settings", "worst seed counts as 1.": "a definition"},
)


@PAGE.states("quality_digits_periods", "quality_fashion_periods")
def periods(digits: Any, fashion: Any) -> Iterator[Statement]:
    for result, fd in ((digits, ".3f"), (fashion, ".2f")):
        for case, scores in result["cases"].items():
            yield quality_row(case, scores, result["cases"]["sync"], fd)


@PAGE.states(
    *("quality_digits_batches", "quality_fashion_batches", "quality_digits_gossip4", "quality_fashion_gossip4"),
    *("quality_digits_async", "quality_fashion_async", "quality_digits_lags"),
    *("quality_digits_sync", "quality_fashion_sync"),
)
def images_needed(*_: Any) -> Iterator[Statement]:
    tables = measured_tables()
    for mode, factors in tables["PERIOD_FACTORS"].items():
        values = [factors[period] for period in sorted(factors)[1:]]
        names = ", ".join(str(period) for period in sorted(factors)[1:])
        cells = " | ".join(["{:.2f}"] * len(values)) + " |" * (4 - len(values))
        yield f"| `sync_mode={mode}`, a period of {names} | {cells}", *values
    gossip = tables["GOSSIP_FACTORS"]
    yield "| gossip on 4, 8 ranks | {:.2f} | {:.2f} | |", gossip[4], gossip[8]
    teams = tables["TEAM_FACTORS"]
    yield "| async, mean age of the opponent 0, 0.5, 1 | {:.2f} | {:.2f} | {:.2f} |", teams[0], teams[0.5], teams[1]
    wires = tables["WIRE_FACTORS"]
    yield "| `int8`, `int4` | {:.2f} | {:.2f} | |", wires["int8"], wires["int4"]
    yield "| `int2`, `sign` | {:.2f} | {:.2f} | |", wires["int2"], wires["sign"]
