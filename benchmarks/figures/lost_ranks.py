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
        "for 30 minutes": "a setting",
        "by the 30 minutes of quantized": "a setting",
        "longer than the timeout of 1 s": "a setting",
        "98 % is not reached": "the aim",
        "98 % cannot be reached": "the aim",
        "`strategy.peer_timeout_s=1`": "a setting",
        "every 30 s": "a setting",
        "15 s or more apart; D pauses 0.4 s": "settings",
        "below 5 s after a death, three timeouts after a freeze, and 98 %": "the aims",
    },
)


@PAGE.states("loss_sync", "loss_quantized", "loss_outer", "loss_gossip")
def repeated_losses(*results: Any) -> Iterator[Statement]:
    for result in results:
        for row in result["rows"]:
            text = f"| {row['strategy']} | {{:.0f}} | {{:d}} | {{:.1f}} s | {{:.1f}} s | {{:.1f}} s "
            pauses = (row[f"pause_{kind}_s"] for kind in ("killed", "frozen", "returned"))
            shares = (100 * row["relative_to_calm"], 100 * row["relative_img_per_s"])
            text += f"| {{:.1f}} % | {{:.1f}} % | {result['machine']['kernels']} |"
            yield text, result["minutes"], row["losses"], *pauses, *shares
            if row["pause_frozen_s"] > 3 * result["timeout"]:
                text = f"of the {row['strategy']}, is {{:.3f}} s, and three timeouts are {{:.0f}} s"
                yield text, row["pause_frozen_s"], 3 * result["timeout"]
            before, after = row["undisturbed_img_per_s"]
            yield f"{row['strategy']} {{:.0f}} and {{:.0f}}", before, after


@PAGE.states("cold_start", "loss_sync")
def share_of_a_start(starts: Any, losses: Any) -> Iterator[Statement]:
    seconds = starts["cases"]["train, two steps"]["after"]["ms"]["median"] / 1000
    cores = losses["machine"]["cores"]
    available = cores * losses["period"]
    text = "two steps take {:.2f} s of one core, of the {:.0f} s that two cores have in a period, {:.1f} %"
    yield text, seconds, available, 100 * seconds / available
    text = "the timeout of {:.0f} s is over, {:.1f} % of a period"
    yield text, losses["timeout"], 100 * losses["timeout"] / losses["period"]


@PAGE.states("loss_float64")
def distances(result: Any) -> Iterator[Statement]:
    (row,) = result["rows"]
    text = "{:.2f} kimg and {:d} deaths, the averaged generator differs from that of a run without losses by {:.1e}"
    yield text, row["kimg"], row["losses"], row["distance"]
    yield "Networks in float64, {:d} ranks", result["ranks"]
