"""Compute how many times the images of its baseline a strategy needed: `python -m benchmarks.quality.images_needed`.

It reads benchmarks/results/ and prints the tables of paragan/plan/select/learning_cost.py. The baseline's Fréchet
distance was taken every 10 kimg; a strategy that ended with the distance that the baseline had after a quarter of the
images needed 4 times the images. Medians over seeds; the worse of digits and Fashion-MNIST; at least 1, rounded to two
decimals. A strategy that ended no worse than the baseline's worst seed needed as many images; one that ended worse than
the baseline's first point counts as that point.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib.timing import format_table

RESULTS = Path(__file__).parents[1] / "results"
RECIPES = ("digits", "fashion")


def read_quality(recipe: str, name: str) -> Any:
    return json.loads((RESULTS / f"quality_{recipe}_{name}.json").read_text("utf-8"))


def median_curve(result: Any, case: str) -> list[tuple[float, float]]:
    """Return kimg and the median Fréchet distance over the seeds of a case."""
    curves = [row["curve"] for row in result["rows"] if row["case"] == case and "curve" in row]
    return [(points[0][0], statistics.median(fd for _, fd in points)) for points in zip(*curves, strict=True)]


def median_fd(result: Any, case: str) -> float:
    return statistics.median(row["fd"] for row in result["rows"] if row["case"] == case)


def images_factor(fd: float, curve: Sequence[tuple[float, float]]) -> float:
    """Return the images of the whole curve over those after which it reached `fd`; 1 if it never did."""
    total = curve[-1][0]
    previous = curve[0]
    if fd >= previous[1]:
        return total / previous[0]
    for kimg, value in curve[1:]:
        if value <= fd:
            weight = (previous[1] - fd) / (previous[1] - value)
            return total / (previous[0] + weight * (kimg - previous[0]))
        previous = kimg, value
    return 1.0


def worst_factor(cases: Mapping[str, tuple[str, str]], baseline: tuple[str, str]) -> float:
    """Return the larger factor of the data sets.

    Args:
        cases: the result (without "quality_RECIPE_") and case of the strategy, by recipe.
        baseline: the result and case of its baseline.
    """
    factors = list[float]()
    for recipe, (name, case) in cases.items():
        baseline_result = read_quality(recipe, baseline[0])
        fd = median_fd(read_quality(recipe, name), case)
        worst_seed = max(row["fd"] for row in baseline_result["rows"] if row["case"] == baseline[1])
        is_within = fd <= worst_seed
        factors.append(1.0 if is_within else images_factor(fd, median_curve(baseline_result, baseline[1])))
    return round(max(factors), 2)


def on_both(name: str, case: str) -> dict[str, tuple[str, str]]:
    return dict.fromkeys(RECIPES, (name, case))


def measured_tables() -> dict[str, Any]:
    """Return the tables of learning_cost.py by their names."""
    sync = ("batches", "sync, 1:1")
    optimistic = ("async", "sync, optimistic")
    all_reduce = ("gossip4", "CP-OAdam")
    periods: dict[str, dict[float, float]] = {}
    for mode, measured in (("parameters", (2, 4, 8)), ("gradients", (2,)), ("accumulate", (2,))):  # on both
        periods[mode] = {1: 1.0}
        for period in measured:
            periods[mode][period] = worst_factor(on_both("periods", f"{mode}, period {period}"), sync)
    for period in (32, 128):
        periods["parameters"][period] = worst_factor(on_both("outer", f"period {period}"), sync)
    delayed = worst_factor(on_both("outer", "period 32, 4 fragments, delay 8"), sync) / periods["parameters"][32]
    ages = {"0, 0": 0.0, "1, 0": 0.5, "1, 1": 1.0}  # of the fakes and of the critic: their mean
    return {
        "PERIOD_FACTORS": periods,
        "DELAY_FACTORS": {0: 1.0, 8: round(max(1.0, delayed), 2)},
        "GOSSIP_FACTORS": {
            1: 1.0,
            **{ranks: worst_factor(on_both(f"gossip{ranks}", "one-peer"), all_reduce) for ranks in (4, 8)},
        },
        "TEAM_FACTORS": {
            age: worst_factor({"digits": ("lags", case)} | ({} if age else on_both("async", "batches 1:1")), optimistic)
            for case, age in ages.items()
        },
        "WIRE_FACTORS": {wire: worst_factor(on_both("sync", wire), sync) for wire in ("int8", "int4", "int2", "sign")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    rows = [(name, str(table)) for name, table in measured_tables().items()]
    print(format_table(("table", "how many times the images"), rows))


if __name__ == "__main__":
    main()
