"""State the figures of docs/measurements/policies.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.curves import fd_at
from benchmarks.figures.registry import Page, Statement, by_case, quality_row

PAGE = Page(
    "docs/measurements/policies.md",
    not_measured={
        "(937 rounds": "arithmetic of a batch",
        "decays to 0": "a limit",
        "asks for 97 % recognised": "a setting",
        "(Adam 5e-4 for G and 1e-3 for D, (0.5, 0.99))": "settings",
    },
)


@PAGE.states("quality_fashion_policies")
def policies(result: Any) -> Iterator[Statement]:
    seconds = by_case(result, "seconds")
    specs = {"biggan": ".1f", "sngan": ".1f", "paragan": ".2f", "optimistic": ".2f"}  # of fd with the recipe's rates

    def median(case: str, *metrics: str) -> list[float]:
        return [result["cases"][case][metric][1] * (1 if metric == "fd" else 100) for metric in metrics]

    for policy in ("ttur", *specs):
        text = f"| `{policy}` | {{:{'.2f' if policy == 'paragan' else '.1f'}}} | {{:.1f}} % | {{:.1f}} % | {{:.0f}} |"
        yield text, *median(policy, "fd", "recognised", "diversity"), seconds[policy]
    text = "| the recipe | {:.2f} | {:.1f} % | {:.0f} |"
    yield text, *median("recipe", "fd", "recognised"), seconds["recipe"]
    for policy, spec in specs.items():
        case = f"{policy}, rates of the recipe"
        yield f"| `{policy}` | {{:{spec}}} | {{:.1f}} % | {{:.0f}} |", *median(case, "fd", "recognised"), seconds[case]


@PAGE.states("acceptance_paper")
def acceptance(result: Any) -> Iterator[Statement]:
    failed = [run for run in result["runs"] if not run["accepted"]]
    assert (len(result["runs"]), len(failed), failed[0]["run"][-7:]) == (6, 1, "DPOSG-2")
    yield "third run has {:.1f} %", 100 * failed[0]["recognised"]


@PAGE.states("quality_digits_paper", "quality_fashion_paper")
def paper_updates(digits: Any, fashion: Any) -> Iterator[Statement]:
    for case in ("DPOSG", "DQGAN"):
        yield quality_row(case, digits["cases"][case])
    for case, scores in fashion["cases"].items():
        text, *figures = quality_row("the recipe's Adam" if case == "sync" else case, scores, None, ".2f")
        yield f"{text} {{:.2f}} |", *figures, fd_at(fashion, case, 0.5)
    yield "where Adam is after two thirds of the images (fd {:.2f})", fd_at(fashion, "sync", 2 / 3)
