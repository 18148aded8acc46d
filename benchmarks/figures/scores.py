"""State the figures of docs/measurements/scores.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page("docs/measurements/scores.md")


@PAGE.states("scores", "scores_prdc")
def speed(scores: Any, alone: Any) -> Iterator[Statement]:
    seconds = list(scores["fd"]["seconds"].values())  # ours, of which the distance, scipy's, products, eigenvalues
    rows, columns = scores["fd"]["features"]
    text = (
        "| Fréchet distance of {:,} x {} features, reference known | {:.1f} s, of which the distance {:.1f} "
        "| {:.1f} s, scipy's `sqrtm` | {:.1f} s, the product of all rows; {:.1f} s, eigenvalues |"
    )
    yield text, rows, columns, *seconds
    ours, products = scores["prdc"]["seconds"].values()
    text = "coverage of {:,} x {:,} x {} | {:.0f} s | | {:.1f} s, the products of all pairs |"
    yield text, *scores["prdc"]["features"], ours, products
    yield "differs from scipy's by {:.1e} of its value", scores["fd"]["differs_from_scipy"]
    ours, products = alone["prdc"]["seconds"].values()
    yield "precision to coverage take {:.1f} s, of which {:.1f} s are products", ours, products
    yield "and {:.0f} MB in addition to the features", alone["prdc"]["peak_bytes_beyond_features"] / 1e6
