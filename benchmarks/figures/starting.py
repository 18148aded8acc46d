"""State the figures of docs/measurements/starting.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page("docs/measurements/starting.md", not_measured={"two steps": "a setting", "commit 50284350": "a commit"})


@PAGE.states("cold_start")
def starts(result: Any) -> Iterator[Statement]:
    for case, times in result["cases"].items():
        before, after = (times[name]["ms"]["median"] / 1000 for name in ("before", "after"))
        yield (
            f"| `{case}` | {{:.2f}} | {{:.2f}} | {{:.2f}} |",
            before,
            after,
            times["after"]["ratio to before"]["median"],
        )
