"""State the figures of docs/measurements/curves.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, quality_row

PAGE = Page(
    "docs/measurements/curves.md",
    not_measured={
        "1:1: 128 images for G and for D. 2:1: D's batch is halved, 128 for G and 64 for D": "settings",
        "half the images for 2:1, it loses nothing to speak of: fd of 2:1 beside 1:1 is": "settings",
        "the ParaGAN poster's figure 7": "a name",
        "at equal images 2:1 has": "settings",
        "A round then costs 8.5 instead of 12 operations": "counted",
        "AdaBelief with an eps of 1e-12": "a setting",
        "so n workers take 16 n": "a setting",
        "a factor: 0.5 (up to 4 workers), 1, 2 and 4 were tried": "settings",
        "it is 2 for any number of workers; with 4 training diverges": "counted",
        "until fd is at most 1, 0.7 and 0.5 (scored every 100)": "settings",
        "no rate above 2 can be used": "counted",
    },
)


@PAGE.states("quality_digits_batches", "quality_fashion_batches")
def batches(digits: Any, fashion: Any) -> Iterator[Statement]:
    for result, fd in ((digits, ".3f"), (fashion, ".2f")):
        for case, scores in result["cases"].items():
            strategy, ratio = case.split(", ")
            text, *figures = quality_row(case, scores, None, fd)
            half = fd_at(result, case, 0.5)
            yield f"{text} {{:{fd}}} |", *figures, half
            if ratio == "2:1":
                full = result["cases"][f"{strategy}, 1:1"]["fd"][1]
                yield f"{result['recipe']}, {strategy}: {{:{fd}}} beside {{:{fd}}}", half, full


@PAGE.states("quality_fashion_optimizers")
def optimizers(fashion: Any) -> Iterator[Statement]:
    for case, scores in fashion["cases"].items():
        text, *figures = quality_row(case, scores, fashion["cases"]["Adam, Adam"], ".2f")
        half = fd_at(fashion, case, 0.5)
        yield f"{text} {{:.2f}} |", *figures, half


@PAGE.states("dqgan_workers")
def workers(result: Any) -> Iterator[Statement]:
    for row in result["best"]:
        text, figures = "| {} | {:g} |", [row["workers"], row["factor"]]
        for low, median, high in row["steps"].values():
            text += " {:,.0f} [{:,.0f}, {:,.0f}] |"
            figures += [median, low, high]
        yield text, *figures


def fd_at(result: Any, case: str, share: float) -> float:
    """Return the median distance of a case after a share of its images."""
    curves = [row["curve"] for row in result["rows"] if row["case"] == case]
    return statistics.median(min(curve, key=lambda p: abs(p[0] - share * curve[-1][0]))[1] for curve in curves)
