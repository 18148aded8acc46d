"""State the figures of docs/measurements/diffusion.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/diffusion.md",
    not_measured={
        "5,000 images": "a setting",
        "18 steps of Heun | 35 |": "2 * 18 - 1",
        "which asks for 97 % and 75 %": "the thresholds of the test",
        "a U-net of 32 and 64 channels": "settings",
    },
)


@PAGE.states("distillation_digits")
def digits(result: Any) -> Iterator[Statement]:
    teacher = result["teacher"]
    for name, evaluations, row in [
        ("teacher, 18 steps of Heun", 35, teacher),
        *((row["case"], 1, row) for row in result["rows"]),
    ]:
        shares = (100 * row[key] for key in ("recognised", "diversity"))
        yield (
            f"| {name} | {evaluations} | {{:.3f}} | {{:.1f}} % | {{:.1f}} % | {{:.0f}} |",
            row["fd_pixels"],
            *shares,
            row["train_s"],
        )
    student = next(row for row in result["rows"] if row["case"] == "DMD2")
    yield "the distance is {:.2f} times the teacher's", student["fd_pixels"] / teacher["fd_pixels"]
    ratio = result["sampling"]["teacher"]["ratio to student"]
    yield "Sampling is {:.0f} times faster (95 % interval {:.0f} to {:.0f})", ratio["median"], *ratio["ci95"]
