"""State the figures of docs/measurements/networks.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, quality_row, significant, speeds

PAGE = Page(
    "docs/measurements/networks.md",
    not_measured={"8 channels in G, 16 in D": "settings", "Seed 0 in float32": "a seed"},
)
GUIDE = Page("docs/networks.md")


@PAGE.states("networks_step")
def speed(result: Any) -> Iterator[Statement]:
    for name, row in result["step"].items():
        generator, discriminator = (count / 1e6 for count in row["parameters"])
        ours, plain = (row["ms"][key]["median"] for key in ("ours, float32", "plain"))
        rounded = [round(ms, -2) if ms > 1000 else round(ms, -1) for ms in (ours, plain)]
        memory = row["took_gb"]["ours, float32"], row["took_gb"]["plain"]
        steps = ", one step of D" if name == "r3gan" else ""
        text = (
            f"| `{name}`, {{:.2f}}M + {{:.2f}}M{steps} | {{:,.0f}} | {{:,.0f}} | {{:.2f}} ({{:.2f}} to {{:.2f}}) "
            "| {:.2f} GB, {:.2f} GB |"
        )
        yield text, generator, discriminator, *rounded, *speeds(row["times faster"]["ours, float32"]), *memory


@PAGE.states("families_step")
def newer_families(result: Any) -> Iterator[Statement]:
    for name, row in result["families"].items():
        generator, discriminator = (count / 1e6 for count in row["parameters"])
        text = f"| `{name}`, {{:.2f}}M + {{:.2f}}M, batch {row['batch']} | {{:.2f}} ({{:.2f}} to {{:.2f}}) |"
        yield text, generator, discriminator, *speeds(row["plain/paragan"])


@PAGE.states("networks_step_bf16")
def speed_bf16(result: Any) -> Iterator[Statement]:
    for name, row in result["step"].items():
        faster = *speeds(row["times faster"]["ours, float32"]), *speeds(row["times faster"]["ours, bf16"])
        ratios = "{:.2f} ({:.2f} to {:.2f}) | {:.2f} ({:.2f} to {:.2f})"
        steps = ", one step of D" if name == "r3gan" else ""
        if "ms" in row:
            ms = [significant(row["ms"][key]["median"]) for key in ("ours, float32", "ours, bf16", "plain")]
            memory = [row["took_gb"][key] for key in ("ours, float32", "ours, bf16", "plain")]
            times, gigabytes = "{:,.0f} ms | {:,.0f} ms | {:,.0f} ms", "{:.2f}, {:.2f}, {:.2f} GB"
            text = f"| `{name}`{steps} | {times} | {ratios} | {gigabytes} |"
            yield text, *ms, *faster, *memory
        else:
            yield f"| `{name}` | | | | {ratios} | |", *faster


@PAGE.states("memory", "memory_bf16", "memory_predicted")
def memory(float32: Any, bf16: Any, predicted: Any) -> Iterator[Statement]:
    labels = (
        "`biggan-imagenet1024`, batch 1",
        "the same, batch 8, `nets.width=48`",
        "the same, batch 16, `nets.width=24`",
        "`biggan-imagenet1024`, batch 1, without checkpointing",
        "the same, batch 8",
        "the same, batch 16, in two passes (`lanes=2`, `device.lanes_per_pass=1`)",
    )
    gigabytes = (case["foreseen_gb"] for case in predicted["cases"].values())
    yield "it would need {:.0f} GB at batch 8 and {:.0f} GB at batch 16", *gigabytes
    cases = [case for name, case in float32["cases"].items() if "biggan" in name] + list(bf16["cases"].values())
    for label, case in zip(labels, cases, strict=True):
        spec = ".2f" if case["took_gb"] < 10 else ".1f"
        text = f"| {label} | {{:{spec}}} GB | {{:{spec}}} GB |"
        yield text, case["foreseen_gb"], case["took_gb"]


@PAGE.states("layout", "memory_process")
def shares(layout: Any, process: Any) -> Iterator[Statement]:
    sngan = layout["networks"]["sngan"]
    share = 100 * sngan["plain/decided"]["median"] / sngan["plain/alone"]["median"]
    yield "In a tuned round of SNGAN, {:.0f} % of the time are convolutions and matrix products", share
    (case,) = process["cases"].values()
    yield "The interpreter and libraries add {:.2f} GB on a CPU", case["process_gb"]


@PAGE.states("operations")
def r3gan(result: Any) -> Iterator[Statement]:
    faster = result["R1, ours is faster"]
    text = "D with R1: {:.2f} ({:.2f} to {:.2f}) times as fast in float32, {:.2f} ({:.2f} to {:.2f}) in bf16"
    yield text, *speeds(faster["float32"]), *speeds(faster["bf16"])
    slower = result["resampling"]["bf16"]["ratio to float32"]["median"]
    yield "because oneDNN takes {:.0f} times as long for them in bf16 on a CPU", significant(slower, 2)


@GUIDE.states("memory", "memory_bf16")
def memory_foreseen(float32: Any, bf16: Any) -> Iterator[Statement]:
    ratios = {name: case["ratio"] for name, case in (float32["cases"] | bf16["cases"]).items()}
    biggan = max(abs(ratio - 1) for name, ratio in ratios.items() if "biggan-imagenet1024" in name)
    yield "was within {:.0f} % of what processes used for `biggan-imagenet1024`", math.ceil(100 * biggan)
    (sngan,) = (ratio for name, ratio in ratios.items() if "sngan" in name)
    yield "and {:.0f} % above it for `sngan-cifar10`", 100 * (sngan - 1)


@PAGE.states("quality_sngan", "quality_sngan_bf16", "quality_biggan")
def quality(sngan: Any, sngan_bf16: Any, biggan: Any) -> Iterator[Statement]:
    text = (
        "fd {:.2f} [{:.2f}, {:.2f}], recognised {:.1f} % [{:.1f}, {:.1f}] (real images {:.1f} %), "
        "diversity {:.2f} [{:.2f}, {:.2f}]."
    )
    _, *figures = quality_row("", sngan["cases"]["float32"])
    share = 100 * sngan["real images recognised"]
    yield text, *figures[:6], share, *(figure / 100 for figure in figures[6:])
    yield "SVM on real images {:.1f} %)", 100 * biggan["real images recognised"]
    for result, spec in ((sngan_bf16, ".2f"), (biggan, ".1f")):
        for precision, scores in result["cases"].items():
            _, *figures = quality_row("", scores)
            text = (
                f"| {precision} | {{:{spec}}} [{{:{spec}}}, {{:{spec}}}] | {{:.1f}} % [{{:.1f}}, {{:.1f}}] "
                "| {:.2f} [{:.2f}, {:.2f}] |"
            )
            yield text, *figures[:6], *(figure / 100 for figure in figures[6:])
    diversity = {precision: scores["diversity"] for precision, scores in biggan["cases"].items()}
    worst = diversity["float32"][0]
    yield "diversity ({:.3f}; the worst seed of float32 has {:.3f}", diversity["bf16"][1], worst


@PAGE.states("equal_time_fashion")
def equal_time(fashion: Any) -> Iterator[Statement]:
    labels = {
        "SNGAN": "`sngan`, width 32",
        "StyleGAN2": "`stylegan2`, at most 64 channels",
        "GAT": "`gat-tiny-cifar10`",
    }
    for row in fashion["rows"]:
        text = (
            f"| Fashion-MNIST | {labels[row['case']]} | {{:.2f}}M, {{:.2f}}M | {{:.0f}} | {{:.2f}} "
            "| {:.2f}, {:.2f} | {:.0f} % |"
        )
        sizes = row["g_numbers"] / 1e6, row["d_numbers"] / 1e6
        quality = row["fd_resnet20"], row["precision_resnet20"], row["recall_resnet20"], 100 * row["accuracy_resnet20"]
        yield text, *sizes, row["kimg"], *quality
    yield "is at the start of its training after {:.0f} kimg", fashion["rows"][-1]["kimg"]
    yield "each trained for {:.0f} minutes of processor time", fashion["minutes"]
    yield "of {:,.0f} images;", fashion["count"]
