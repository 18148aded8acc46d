"""State the figures of docs/measurements/reconstruction.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/reconstruction.md",
    not_measured={
        "16 to 32 px": "sizes",
        "The first 16 test images": "of the picture",
        "the 64 features of a ResNet-20": "sizes",
        "Scores of the 1,000 test images": "a size",
    },
)
PLAIN, ADVERSARIAL = "L1", "L1 + adversarial"


@PAGE.states("super_resolution")
def super_resolution(result: Any) -> Iterator[Statement]:
    rows = result["rows"]
    for name in ("bicubic", PLAIN, ADVERSARIAL):
        row = rows[name]
        scores = row["psnr"], row["fd_resnet20"], 100 * row["accuracy"]
        yield f"| {name} | {{:.2f}} | {{:.2f}} | {{:.1f}} % |", *scores
    yield "| the data | | 0 | {:.1f} % |", 100 * rows["the data"]["accuracy"]
    lost = rows[PLAIN]["psnr"] - rows[ADVERSARIAL]["psnr"]
    ratio = rows[PLAIN]["fd_resnet20"] / rows[ADVERSARIAL]["fd_resnet20"]
    yield "{:.2f} dB of PSNR, and divides `fd_resnet20` by {:.1f}.", lost, ratio
