"""State the figures of docs/measurements/data.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, significant

PAGE = Page(
    "docs/measurements/data.md",
    not_measured={
        "bursts of 2 to 5 s with pauses of 2 to 4 s. A step of 300 ms": "settings",
        "(limit: 1 GiB)": "a setting",
        "batches of 64": "a setting",
        "turns of 24 s": "a setting",
        "over 60 s": "a setting",
        "[64, 3, R, R] in [-1, 1]": "a shape",
        "[64, R, R, 3]": "a shape",
    },
)


@PAGE.states("pipeline_congestion")
def congested_storage(congestion: Any) -> Iterator[Statement]:
    labels = {
        "ours": "paragan, default settings",
        "dataloader": "DataLoader, 2 workers, prefetch 2",
        "dataloader, best setting": "the best of 16 settings, each tried for 24 s ({} workers, prefetch {})",
        "webdataset": "webdataset's WebLoader, 2 workers, a buffer of 1,000",
    }
    for name, label in labels.items():
        contestant = congestion["contestants"][name]
        shares, bursts, images, memory = (
            statistics.median(row[key] for row in contestant["rounds"])
            for key in ("share", "share_in_bursts", "images_s", "memory_mb")
        )
        longest = statistics.median(row["wait_ms"]["max"] for row in contestant["rounds"])
        unit, longest = ("{:.0f} ms", longest) if longest < 100 else ("{:.1f} s", longest / 1000)
        settings = [contestant["options"]["workers"], contestant["options"]["prefetch"]] if "{}" in label else []
        text = f"{label} | {{:.1f}} % | {{:.1f}} % | {unit} | {{:.0f}} | {{:.0f}} MB"
        yield text, *settings, 100 * shares, 100 * bursts, longest, images, memory
    best, *others = sorted(100 * setting["share"] for setting in congestion["search"])
    close = [share for share in others if share < 0.8]
    yield "waited {:.1f} % of its turn of 24 s, and {} others at most {:.1f} %", best, len(close), max(close)
    yield "over 60 s it waits {:.1f} %", 100 * congestion["contestants"]["dataloader, best setting"]["share"]


@PAGE.states("remote_ranges")
def remote_ranges(result: Any) -> Iterator[Statement]:
    for row in result["rows"]:
        ratios = [
            f"{row[name]['median']:.2f} [{row[name]['ci95'][0]:.2f}, {row[name]['ci95'][1]:.2f}]"
            for name in ("requests_ratio", "cpu_ratio")
        ]
        settings = f"| {row['protocol']} | {row['bytes']:,} | {row['threads']} "
        text = settings + f"| {{:,.0f}} | {{:,.0f}} | {ratios[0]} | {ratios[1]} |"
        yield text, *(significant(row["requests_s"][name]) for name in ("before", "now"))


@PAGE.states("pipeline_decode")
def decoding(decode: Any) -> Iterator[Statement]:
    small, large = (size["contestants"] for size in decode["sizes"])

    def images_s(contestant: str) -> tuple[float, ...]:
        return tuple(significant(size[contestant]["images_s"]["median"]) for size in (small, large))

    for label, contestant in (
        ("the decoder alone, two threads", "decoder alone"),
        ("the decoder alone, two processes", "decoder alone, processes"),
        ("paragan, `worker_type=threads`", "ours, uint8, threads"),
        ("paragan, `worker_type=processes`", "ours, uint8, processes"),
        ("paragan", "ours"),
        ("DataLoader with Pillow", "dataloader"),
        ("webdataset", "webdataset"),
    ):
        digits = [significant(speed, 3 if speed > 10_000 else 2) for speed in images_s(contestant)]
        yield f"| {label} | {{:,.0f}} | {{:,.0f}} |", *digits
    shares = [100 * size["ours, uint8"]["of_the_limit"] for size in (small, large)]
    both = [figure for pair in zip(images_s("ours, uint8"), shares) for figure in pair]
    yield "| paragan | {:,.0f} ({:.0f} % of the threads) | {:,.0f} ({:.0f} %) |", *both
    low, high = small["decoder alone"]["images_s"]["range"]
    yield "varied from {:,.0f} to {:,.0f} at 64 px", significant(low), significant(high)
    faster = [size["dataloader"]["ours_is_faster"] for size in (small, large)]
    yield "paragan is {:.1f} (64 px) and {:.1f} (256 px) times as fast as DataLoader", *faster
