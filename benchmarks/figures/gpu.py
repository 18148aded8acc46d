"""State the figures of docs/measurements/gpu.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/gpu.md",
    not_measured={
        "H100 80GB HBM3": "a name",
        "2.11.0": "a version",
        "16 cores": "the machine",
        "8192 x 8192 x 8192": "a size",
        "2^26 numbers": "a size",
        "int4": "a name",
        "int8": "a name",
        "bf16": "a name",
        "float32": "a name",
    },
)
LABELS = {
    "sngan-cifar10": "SNGAN, 32 px",
    "sngan-cifar10, batch 512": "SNGAN, 32 px",
    "biggan-cifar10": "BigGAN, 32 px",
    "r3gan-cifar10": "R3GAN, 32 px",
    "fashion": "`fashion`, 32 px",
    "digits": "`digits`, 8 px",
}
VARIANTS = ("bf16, recorded", "bf16", "plain bf16", "float32", "plain float32")


@PAGE.states("gpu_h100")
def throughput(result: Any) -> Iterator[Statement]:
    for name, label in LABELS.items():
        workload = result["throughput"][name]
        rows = workload["rows"]
        cells = [rows[variant]["img_per_s"] for variant in VARIANTS if "ms" in rows[variant]]
        holes = " | ".join("{:,.0f}" if "ms" in rows[variant] else "" for variant in VARIANTS).replace("|  ", "| ")
        share = 100 * rows["bf16, recorded"]["share_of_peak"]
        yield f"| {label} | {{}} | {holes} | {{:.0f}} % |".replace("  |", " |"), workload["batch"], *cells, share
    for side in (128, 256, 512, 1024):
        workload = result["throughput"][f"biggan-imagenet{side}"]
        row = workload["rows"]["bf16"]
        figures = side, workload["batch"], row["img_per_s"], row["peak_gb"], 100 * row["share_of_peak"]
        yield "| {} | {} | {:,.0f} | {:.1f} | {:.0f} % |", *figures


@PAGE.states("gpu_h100")
def gains(result: Any) -> Iterator[Statement]:
    rows = result["throughput"]["sngan-cifar10"]["rows"]
    recorded, played, plain, _, plain32 = (rows[variant]["img_per_s"] for variant in VARIANTS)
    text = "{:.1f} times a plain loop in bf16 and {:.1f} times one in float32; without recording {:.1f} times"
    yield text, recorded / plain, recorded / plain32, played / plain
    yield "Recording makes SNGAN at batch 64 {:.1f} times faster", recorded / played
    r3gan = result["throughput"]["r3gan-cifar10"]["rows"]
    ratios = [r3gan[a]["img_per_s"] / r3gan[b]["img_per_s"] for a, b in (VARIANTS[1:3], VARIANTS[3:])]
    yield "R3GAN, whose kernels are long, gains nothing from it, and is {:.1f} and {:.1f} times a plain loop", *ratios


@PAGE.states("gpu_h100")
def limits(result: Any) -> Iterator[Statement]:
    limit = result["limits"]
    figures = limit["bf16_matmul_tflops"], limit["float32_matmul_tflops"], limit["copy_gb_per_s"]
    yield "{:.0f} TFLOP/s in bf16 and {:.0f} in float32, and a copy moved {:,.0f} GB/s", *figures
    rows = result["wires"]["rows"]
    copies = [rows[name]["copies"] for name in ("exact", "bf16", "int8", "int4")]
    yield "took {:.1f} (exact), {:.1f} (bf16), {:.1f} (int8) and {:.1f} (int4) times a copy", *copies
