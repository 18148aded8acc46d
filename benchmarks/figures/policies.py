"""State the figures of docs/measurements/policies.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, by_case, quality_row

PAGE = Page(
    "docs/measurements/policies.md",
    not_measured={"(937 rounds": "arithmetic of a batch", "decays to 0": "a limit"},
)


@PAGE.states("quality_fashion_policies")
def rivals(result: Any) -> Iterator[Statement]:
    cases = result["cases"]
    seconds = by_case(result, "seconds")

    def middle(case: str, *metrics: str) -> list[float]:
        return [cases[case][metric][1] * (1 if metric == "fd" else 100) for metric in metrics]

    text = "| the recipe: Adam 5e-4 and 1e-3, (0.5, 0.99) | | | | {:.0f} | {:.2f} | {:.1f} % |"
    yield text, seconds["recipe"], *middle("recipe", "fd", "recognised")
    specs = {
        "ttur": (".1f", ".2f", " (the recipe)"),
        "biggan": (".1f", ".1f", ""),
        "sngan": (".1f", ".1f", ""),
        "paragan": (".2f", ".2f", ""),
        "optimistic": (".1f", ".2f", ""),
    }
    for policy, (published, of_recipe, remark) in specs.items():
        text = f"| `{policy}` | {{:{published}}} | {{:.1f}} % | {{:.1f}} % | {{:.0f}} "
        text += f"| {{:{of_recipe}}}{remark} | {{:.1f}} % |"
        rates = middle(f"{policy}, rates of the recipe", "fd", "recognised")
        yield text, *middle(policy, "fd", "recognised", "diversity"), seconds[policy], *rates


@PAGE.states("quality_digits_paper")
def paper_updates(result: Any) -> Iterator[Statement]:
    for case in ("DPOSG", "DQGAN"):
        yield quality_row(case, result["cases"][case])
