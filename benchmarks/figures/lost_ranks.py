"""State the figures of docs/measurements/lost_ranks.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/lost_ranks.md",
    not_measured={
        "97.7 %": "published, of DiLoCo",
        "62 faults in 30 minutes": "published",
        "train for 30 minutes": "a setting",
        "98 % is not reached": "the aim",
        "`strategy.peer_timeout_s=1`": "a setting",
        "every 30 s": "a setting",
        "below 5 s after a death, three timeouts after a freeze, and 98 %": "the aims",
    },
)


@PAGE.states("loss_sync")
def repeated_losses(*results: Any) -> Iterator[Statement]:
    for result in results:
        for row in result["rows"]:
            text = f"| {row['strategy']} | {{:d}} | {{:.1f}} s | {{:.1f}} s | {{:.1f}} s | {{:.1f}} % | {{:.1f}} % |"
            pauses = (row[f"pause_{kind}_s"] for kind in ("killed", "frozen", "returned"))
            yield text, row["losses"], *pauses, 100 * row["relative_to_calm"], 100 * row["relative_img_per_s"]
            before, after = row["undisturbed_img_per_s"]
            yield f"({row['strategy']}: {{:.0f}} and {{:.0f}} images per second)", before, after
