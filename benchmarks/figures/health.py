"""State the figures of docs/measurements/health.md."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/health.md",
    not_measured={
        "`noisy_label` 3 |": "a label",
        "sync on 1 and on 2 ranks; an int4 wire on 2;": "settings",
        "quantized (int8) on 2; gossip on 2; async on 1; G and D on different ranks on 2;": "settings",
        "one sum over ranks of 16 kB (8 bytes for each of 2 x 1,024 weights)": "arithmetic of bytes",
        "two norms of 1,024 weights": "a setting",
    },
)


@PAGE.states("health_planted")
def planted_failures(planted: Any) -> Iterator[Statement]:
    rows: dict[str, list[Any]] = {}
    for row in planted["rows"]:
        rows.setdefault(row["failure"], []).append(row)

    def count_and_images(failure: str) -> tuple[int, int]:
        return len(rows[failure]), max(row["images"] for row in rows[failure])

    def value(failure: str, least: Callable[[list[float]], float], key: str = "") -> float:
        return least([row["value"] for row in rows[failure] if re.search(key, row["key"])])

    for failure in ("D's learning rate x 100, from the start", "D's learning rate x 100, at 20 kimg"):
        seeds, images = count_and_images(failure)
        text = f"| {failure} | `overshoot` | {{}} | `Health/D/step` {{:.1f}} to {{:.1f}} | {{:,}} |"
        yield text, seeds, value(failure, min), value(failure, max), images
    failure = "G frozen, from the start"
    seeds, images = count_and_images(failure)
    text = (
        f"| {failure} | `no_update`, `d_saturated` | {{}} "
        "| `Health/G/update_norm` {:.0f}, `Health/D/accuracy` {:.1f} | {:,} |"
    )
    yield text, seeds, value(failure, max, "update_norm"), value(failure, min, "accuracy"), images
    failure = "G frozen, at 20 kimg"
    seeds, images = count_and_images(failure)
    yield (
        f"| {failure} | `no_update` | {{}} | `Health/G/update_norm` {{:.0f}} | {{:,}} |",
        seeds,
        value(failure, max),
        images,
    )
    failure = "one label's data replaced by noise"
    seeds, images = count_and_images(failure)
    text = "| `noisy_label` 3 | {} | `Health/label/roughness` {:.2f} to {:.2f} | {:,} |"
    yield text, seeds, value(failure, min), value(failure, max), images
    failure = "one rank with another seed"
    seeds, images = count_and_images(failure)
    text = "| `drift` | {} | `Health/G/replica_drift` {:.2f} to {:.2f} | {} |"
    yield text, seeds, value(failure, min), value(failure, max), images
    yield (
        "| `nonfinite`, the run ends | {} | `Loss/D/loss` | {:,} |",
        *count_and_images("NaN in a gradient, at 20 kimg"),
    )
    failure = "NaN in a gradient, at 20 kimg, 2 ranks, int8 wire"
    text = "| the step is discarded, the run ends | {} | the message names the parameter | {} |"
    yield text, *count_and_images(failure)
    said = [row["all"] for row in planted["rows"] if "x 100" in row["failure"]]
    stalled = (sum(bool(re.search(kind, one)) for one in said) for kind in ("d_saturated", "stalled"))
    yield "(`d_saturated` with {} of the seeds and `stalled` with {}, some kimg later)", *stalled


@PAGE.states("health_healthy")
def healthy_runs(healthy: Any) -> Iterator[Statement]:
    longest = {row["run"]: row["longest_step"]["D"] for row in healthy["rows"]}
    optimistic = [step for run, step in longest.items() if "quantized" in run or "gossip" in run]
    others = [step for run, step in longest.items() if not any(k in run for k in ("quantized", "gossip", "async"))]
    yield "longest step of the healthy runs below was {:.2f} of D's norm", max(longest.values())
    yield "(the first step of `async`), {:.2f} with `gossip` and `quantized`", max(optimistic)
    yield "and at most {:.2f} elsewhere.", max(others)
    yield "healthy runs of 40 kimg with {} checks each", statistics.mode(row["lines"] for row in healthy["rows"])
    yield "by 2 workers ({} checks)", max(row["lines"] for row in healthy["rows"])


@PAGE.states("health_cost")
def cost(result: Any) -> Iterator[Statement]:
    step, unwatched, check = (1000 * result[key] for key in ("step_s", "unwatched_s", "look_s"))
    yield (
        "a step takes {:.1f} ms (interleaved with {:.1f} ms without checks), a check {:.1f} ms",
        step,
        unwatched,
        check,
    )
    yield "there are {:.1f} steps per tick: {:.1f} % of the time", result["steps_a_tick"], 100 * result["share"]
