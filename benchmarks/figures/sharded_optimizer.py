"""State the figures of docs/measurements/sharded_optimizer.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page("docs/measurements/sharded_optimizer.md", not_measured={"64 px": "a setting"})


@PAGE.states("sharded_memory")
def memory(result: Any) -> Iterator[Statement]:
    for case, kinds in result["cases"].items():
        for kind, row in kinds.items():
            megabytes = [row[name] / 1e6 for name in ("peak", "between rounds", "foreseen state")]
            yield f"| {case} | {kind} | {{:.0f}} | {{:.0f}} | {{:.0f}} |", *megabytes
    whole, sharded = result["cases"]["4 ranks, DCGAN of width 128, batch 4"].values()
    saved = [100 * (1 - sharded[name] / whole[name]) for name in ("peak", "between rounds")]
    yield "On 4 ranks the peak is {:.0f} % lower, and what stays between rounds {:.0f} %", *saved
