"""State the figures of docs/measurements/starting.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/starting.md",
    not_measured={
        "two steps": "a setting",
        "commit 50284350": "a commit",
        "commit 85aa8ac9": "a commit",
        "commit dc061122": "a commit",
    },
)


@PAGE.states("cold_start")
def starts(result: Any) -> Iterator[Statement]:
    yield from state_cases(result, result["cases"])


@PAGE.states("cold_start_charts")
def starts_with_charts(result: Any) -> Iterator[Statement]:
    yield from state_cases(result, ("report", "train, two steps"))


@PAGE.states("cold_start_recipes")
def start_of_recipes(result: Any) -> Iterator[Statement]:
    yield from state_cases(result, ["recipes"])
    others = [
        times["after"]["ratio to before"]["median"] for name, times in result["cases"].items() if name != "recipes"
    ]
    yield "they took {:.2f} to {:.2f} of their time before", min(others), max(others)


def state_cases(result: Any, cases: Iterable[str]) -> Iterator[Statement]:
    for case in cases:
        times = result["cases"][case]
        before, after = (times[name]["ms"]["median"] / 1000 for name in ("before", "after"))
        yield (
            f"| `{case}` | {{:.2f}} | {{:.2f}} | {{:.2f}} |",
            before,
            after,
            times["after"]["ratio to before"]["median"],
        )


@PAGE.states("install_size")
def sizes(result: Any) -> Iterator[Statement]:
    before, after = (result["totals"][name] for name in ("before", "after"))
    yield "| MB | {:,.0f} | {:,.0f} |", before["bytes"] / 1e6, after["bytes"] / 1e6
    yield "| packages | {:d} | {:d} |", before["packages"], after["packages"]
    packages = result["packages"]["after"]
    without_torch = ((total["bytes"] - packages["torch"]) / 1e6 for total in (before, after))
    yield "| MB without PyTorch | {:,.0f} | {:,.0f} |", *without_torch
    yield "SciPy ({:.0f} MB)", packages["scipy"] / 1e6
    served = packages["tensorboard-data-server"] + packages["grpcio"]
    yield "TensorBoard ({:.0f} MB, and {:.0f} MB", packages["tensorboard"] / 1e6, served / 1e6
