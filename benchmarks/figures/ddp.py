"""State the figures of docs/measurements/ddp.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, laboratory, speeds

PAGE = Page(
    "docs/measurements/ddp.md",
    not_measured={
        "with `every=100`": "a setting",
        "buckets are large (25 MB by default)": "a setting",
        "(20 ms one way, say)": "an example",
        "by more than 1e-5 in float32 and 1e-12 in float64": "held by a test",
        "In its first 100 turns": "a setting",
        "with 4 accumulated passes": "a setting",
    },
)
LABELS = {"ddp": "float32", "ddp+fp16": "torch's fp16 hook", "ddp+powersgd1": "torch's PowerSGD, rank 1"}
LABELS |= {f"ddp+{wire}": f'`ddp_hook("{wire}")`' for wire in ("int8", "int4", "sign")}


@PAGE.states("ddp_lab")
def hooks(result: Any) -> Iterator[Statement]:
    step_ms = {row["strategy"]: row["step_ms"] for row in laboratory(result, "200 Mbit/s, DDP")}
    for name, label in LABELS.items():
        yield f"| {label} | {{:.0f}} | {{:.2f}} |", step_ms[name], step_ms["ddp"] / step_ms[name]


@PAGE.states("replica_check")
def check(result: Any) -> Iterator[Statement]:
    for row in result["rows"]:
        share = row["check_ms"] / row["step_ms"]
        text = "| {:.2f}M | {:.1f} | {:.1f} | {:.2f} % |"
        yield text, row["parameters"] / 1e6, row["step_ms"], row["check_ms"], share


@PAGE.states("replica")
def replicas(result: Any) -> Iterator[Statement]:
    for case in result["cases"].values():
        ms = [case["times"][name]["ms"]["median"] for name in ("ddp", "replica")]
        text = "| {:.1f}M | {} | {:.1f} | {:.1f} | {:.3f} [{:.3f}, {:.3f}] |"
        yield text, case["parameters"] / 1e6, case["passes"], *ms, *speeds(case["replica"])
