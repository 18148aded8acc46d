"""Run and print comparisons with DistributedDataParallel on several ranks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.lib.subprocess_timing import run_ranks
from benchmarks.lib.timing import format_table


def collect_results(
    ranks: int, rank_main: Callable[..., None], options: argparse.Namespace, format_report: Callable[[str, Any], str]
) -> dict[str, Any]:
    """Run `rank_main` on all ranks, print each result of rank 0, and return them by case."""
    results: dict[str, Any] = {}
    for name, result in run_ranks(ranks, rank_main, options):
        results[name] = result
        print(format_report(name, result), flush=True)
    return results


def format_times(times: Mapping[str, Any]) -> str:
    """Return a table of the times of each contestant, and of their ratios to DDP, with 95 % intervals."""
    rows = []
    for contestant, entry in times.items():
        ms, ratio = entry["ms"], entry["ratio to ddp"]
        rows.append([contestant, *(f"{x:.2f}" for x in (ms["median"], *ms["ci95"], ratio["median"], *ratio["ci95"]))])
    return format_table(["", "ms/step", "low", "high", "to ddp", "low", "high"], rows)


def format_conclusion(contestant: str, ratio: Mapping[str, Any]) -> str:
    """Say whether a contestant is slower than DDP."""
    conclusion = "at most 1.0 within noise" if ratio["ci95"][0] <= 1.0 else "SLOWER than ddp"
    return f"{contestant} / ddp = {ratio['median']:.3f}: {conclusion}"
