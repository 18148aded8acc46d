"""State the figures of docs/measurements/engines.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page("docs/measurements/engines.md")


@PAGE.states("engines")
def engines(result: Any) -> Iterator[Statement]:
    for row in result["rows"]:
        facts = f"| {row['engine']} | {row['version']} | {row['killed']} | {row['happened']} "
        yield facts + f"| {{:.1f}} | {_yes_or_no(row['same_bytes'])} |", row["seconds"]


@PAGE.states("srun_kills")
def srun_kills(result: Any) -> Iterator[Statement]:
    rows = result["rows"]
    summary = result["summary"]
    yield "{} ranks were killed in {} runs", summary["kills"], len({row["run"] for row in rows})
    yield "{} checkpoints were read, {} were broken", summary["checkpoints_read"], summary["broken_checkpoints"]
    yield "The longest wait was {:.1f} s", summary["slowest_s"]
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        kills = [row for row in rows if row["strategy"] == strategy and row["seconds"] is not None]
        seconds = [row["seconds"] for row in kills]
        outcome = ", ".join(sorted({row["outcome"] for row in kills}))
        same = {row["same_bytes"] for row in kills}
        equal = "not compared" if same == {None} else _yes_or_no(same == {True})
        text = f"| `{strategy}` | {{}} | {outcome} | {{:.1f}} | {{:.1f}} | {equal} |"
        yield text, len(kills), statistics.median(seconds), max(seconds)


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"
