"""State the figures of README.md, "Measured"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures import clock
from benchmarks.figures.registry import Page, Statement, laboratory

PAGE = Page(
    "README.md",
    not_measured={
        "200 Mbit/s, 20 ms, 100k": "settings",
        "20 Mbit/s, 50 ms": "settings",
        "every 32 rounds": "a setting",
    },
)


@PAGE.states("acceptance", "ddp", "step", "lab", "gossip_lab", "teams", "quality_digits_async")
def table(acceptance: Any, ddp: Any, step: Any, lab: Any, gossip: Any, teams: Any, quality: Any) -> Iterator[Statement]:
    yield "recognises as requested | {:.1f} % |", 100 * acceptance["runs"][0]["recognised"]
    sizes = ddp["sizes"].values()
    yield "step time against DistributedDataParallel, {:.2f}M / {:.1f}M", *(size["parameters"] / 1e6 for size in sizes)
    yield "parameters | {:.2f} / {:.2f} of its time |", *(size["ours"]["median"] for size in sizes)
    yield "Fashion-MNIST networks | {:.2f} times faster |", step["naive/fast"]["median"]
    ms = {row["wire"]: row["step_ms"] for row in laboratory(lab, "200 Mbit/s") if row["strategy"] == "sync"}
    faster = [ms["exact"] / ms[wire] for wire in ("int8", "int4", "sign")]
    yield "int8, int4, sign against float32 | {:.1f}, {:.1f}, {:.0f} times faster |", *faster
    _, all_reduce, one_peer, _ = laboratory(gossip, "200 Mbit/s, 20 ms, 100k parameters")
    yield "gossip against CP-OAdam | {:.1f} times faster |", all_reduce["step_ms"] / one_peer["step_ms"]
    fd = [quality["cases"][case]["fd"][1] for case in ("batches 1:1", "sync, optimistic")]
    gain = teams["cases"]["digits, 1:1"]["measured_speedup"][0]
    yield "(fd, lower is better) | {:.2f} times faster / {:.3f} beside {:.3f} |", gain, *fd


@PAGE.states("clock_digits")
def slow_links(result: Any) -> Iterator[Statement]:
    sooner, fewer = clock.best_over_sync(result)
    yield "int4, applied late | {:.1f} times sooner, {:.0f} times fewer bytes |", sooner, fewer


@PAGE.states("prediction", "pipeline_congestion")
def plan_and_data(prediction: Any, congestion: Any) -> Iterator[Statement]:
    summary = prediction["summary"]
    errors = 100 * summary["median_error"], 100 * summary["worst_error"]
    yield "error of {} predicted step times, median / worst | {:.0f} % / {:.0f} % |", summary["configurations"], *errors
    contestants = congestion["contestants"]
    shares = [
        100 * contestants[name]["share"] for name in ("ours", "dataloader", "dataloader, best setting", "webdataset")
    ]
    text = "ours / DataLoader / tuned in 24 s turns / webdataset | {:.1f} % / {:.0f} % / {:.0f} % / {:.0f} % |"
    yield text, *shares
