"""State the figures of docs/measurements/weak_scaling.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/weak_scaling.md",
    not_measured={
        "70 GB/s and 1 µs between neighbors of a torus, where all-reduces use rings of 32": "assumptions",
        "The paper's 91 %": "of the paper",
        "less than 10 %": "a row of the table",
        "2,046 hops for every 2 MB": "arithmetic of hops",
        "1 Tflop/s": "an assumption",
        "20 up, 40 ms; 1 % leave": "assumptions",
        '"Every 64th step"': "a setting",
        "sync, int8, every 64th step": "a setting",
        "A ring of 100,000": "an assumption",
        "loses a worker every 3.6 s": "arithmetic: a hundredth of 100,000 leave in an hour",
        "one exchange in 64": "a setting",
        "with 4 bits": "a setting",
        "lags by 16": "a setting",
        "1.6M images a round": "arithmetic: 16 images of 100,000 workers",
    },
)


@PAGE.states("scale")
def of_the_paper(scale: Any) -> Iterator[Statement]:
    paper = scale["paper"]
    assumed = paper["assumed"]
    yield "BigGAN at 128 px ({:.1f}M parameters), {} images a worker", paper["numbers"] / 1e6, assumed["images"]
    yield "a TPU v3 with {:.1f} Tflop/s in bf16", assumed["peak_flops"] / 1e12
    yield "are reached ({:.0f} ms a round alone)", paper["alone_ms"]
    labels = ("no jitter", "2 %", "5 %", "10 %", "2 %, one flat ring")
    for label, row in zip(labels, paper["rows"], strict=True):
        efficiency = [row["efficiency"][workers] for workers in ("128", "256", "512", "1024")]
        yield f"| {label} | {{:.2f}} | {{:.2f}} | {{:.2f}} | {{:.2f}} |", *efficiency
    yield "| the paper | | | | {:.2f} |", paper["paper"]


@PAGE.states("scale")
def of_volunteers(scale: Any) -> Iterator[Statement]:
    volunteers = scale["volunteers"]
    yield (
        "SNGAN on CIFAR-10 ({:.1f}M parameters), {} images",
        volunteers["numbers"] / 1e6,
        volunteers["assumed"]["images"],
    )
    yield "({:.2f} s a round alone)", volunteers["alone_ms"] / 1e3
    rows = {row["name"]: row for row in volunteers["rows"] if row["workers"] == 100_000}

    def speed(row: Any) -> tuple[float, ...]:
        return row["images_per_s"], 100 * row["of_alone"], row["rounds_per_h"]

    for name in ("one peer", "one peer, int8", "one peer, int4, every 16th step", "random ring, int8"):
        row = rows[f"gossip, {name}"]
        text = f"| gossip, {name} | {{:,.0f}} | {{:.1f}}% | {{:,.0f}} | {{:.2f}} GB | {{:.1f}} | {{:.0f}} |"
        yield text, *speed(row), row["sent_bytes_per_h"] / 1e9, row["apart"], row["mixes"]
    row = rows["gossip, ring that lags by 16"]
    text = "| gossip, ring that lags by 16 | {:,.0f} | {:.1f}% | {:,.0f} | {:.2f} GB | {:.1f} and growing | billions |"
    yield text, *speed(row), row["sent_bytes_per_h"] / 1e9, row["apart"]
    row = rows["a game per label"]
    yield "| per-label models | {:,.0f} | {:.1f}% | {:,.0f} | {:.1f} MB |", *speed(row), row["sent_bytes_per_h"] / 1e6
    fetch_mb = row["joiners_bytes_per_h"] / volunteers["crowd"]["leaving"] / 1e6
    yield "The fetch of a joining worker ({:.0f} MB)", fetch_mb
    (periodic,) = (row for row in volunteers["rows"] if row["workers"] == 1000 and "64th" in row["name"])
    yield "over rings of rings trains, at {:.0f} % of the speed", 100 * periodic["of_alone"]
    share = 100 * rows["gossip, one peer, int4, every 16th step"]["of_alone"]
    yield "reaches {:.0f} % of what the machines could do", share
