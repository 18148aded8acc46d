"""State the figures of docs/planning.md: measured links, simulated workers."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement
from paragan.plan.links import parse_duration, parse_rate

PAGE = Page("docs/planning.md")


@PAGE.states("prediction")
def measured_links(prediction: Any) -> Iterator[Statement]:
    shares: list[float] = []
    longer_ms: list[float] = []
    laboratories = [lab for lab in prediction["laboratories"].values() if any("--rate=" in o for o in lab["links"])]
    for laboratory in laboratories:
        emulated = dict(option.removeprefix("--").split("=") for option in laboratory["links"])
        found = laboratory["found"]["links"]
        rate = parse_rate(emulated["rate"].replace("mbit", "Mbit/s").replace("gbit", "Gbit/s"))
        shares += [100 * parse_rate(text) / rate for text in (*found["up"], *found["down"])]
        longer_ms.append(1000 * (parse_duration(found["latency"]) - parse_duration(emulated.get("latency", "0 ms"))))
    yield "In {} emulated networks of equal hosts", len(laboratories)
    yield "the measured rates were {:.0f} to {:.1f} % of the emulated ones", min(shares), max(shares)
    yield "the latencies {:.1f} to {:.1f} ms longer", min(longer_ms), max(longer_ms)


@PAGE.states("small_worlds")
def small_worlds(result: Any) -> Iterator[Statement]:
    errors: dict[str, list[float]] = {}
    for row in result["rows"]:
        errors.setdefault(row["strategy"], []).append(100 * abs(row["error"]))
    for strategy, values in errors.items():
        yield f"| `{strategy}` | {{:.1f}} % | {{:.0f}} % |", statistics.median(values), max(values)
