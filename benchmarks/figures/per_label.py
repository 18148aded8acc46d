"""State the figures of docs/measurements/per_label.md, and of docs/per_label.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, by_case, significant, speeds

PAGE = Page(
    "docs/measurements/per_label.md",
    not_measured={
        "with labels of 1 s": "a thought",
        "(160 kimg, 16 per label)": "settings",
        "`label`: 500 images": "a setting",
        "from 0 (an ordinary conditional GAN) to 300 (in effect the distance only)": "settings",
        "features of a ResNet-20": "a name",
        "The default, 3, was chosen so": "a setting",
    },
)
GUIDE = Page("docs/per_label.md")


@PAGE.states("labels_quality_digits", "labels_quality_fashion")
def quality(digits: Any, fashion: Any) -> Iterator[Statement]:
    labels = {
        "per label": "per label (hinge)",
        "conditional": "conditional (hinge)",
        "per label, W-CGAN (penalty)": "per label, `wcgan-gp`",
        "per label, W-CGAN (clipping)": "per label, `wcgan`",
        "conditional, W-CGAN (penalty)": "conditional, `wcgan-gp`",
    }
    cells = "| {:,.0f} | {:.3f} / {:.2f} | {:.3f} / {:.3f} | {:.3f} / {:.3f} | {:.1f} % | {:.1f} % |"
    for row in (*digits["rows"], *fashion["rows"]):
        label = labels.get(row["case"], "per label, `DC-CGAN` with `dcgan`, **twice the budget**")
        distances = [row[f"{which} {metric}"] for metric in ("fd", "precision", "recall") for which in ("all", "label")]
        yield f"| {label} {cells}", row["kimg"], *distances, 100 * row["recognised"], 100 * row["diversity"]
    ratios = []
    for result in (fashion, digits):
        kimg = by_case(result, "kimg")
        ratios.append(kimg["per label"] / kimg["conditional"])
    yield "process {:.1f} to {:.1f} times the images", *ratios
    yield "it saw {:.0f} to {:.0f} % fewer images", *(100 - 100 / ratio for ratio in ratios)
    steps = [row["steps"] for row in digits["rows"] if "per label, W-CGAN" in row["case"]]
    yield "{:,.0f} to {:,.0f} steps of G are few", *(significant(count, 2) for count in steps)


WCGAN_COLUMNS = (
    ("fd", 1, ".2f"),
    ("is", 1, ".2f"),
    ("accuracy", 100, ".1f"),
    ("recall", 1, ".3f"),
    ("intra_fd", 1, ".2f"),
)


@PAGE.states("wcgan_fashion", "wcgan_cifar")
def wcgan(fashion: Any, cifar: Any) -> Iterator[Statement]:
    for result in (fashion, cifar):
        for case in dict.fromkeys(row["case"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["case"] == case]
            text, figures = f"| {case} | {{:,.0f}} |", [rows[0]["kimg"]]
            for metric, scale, spec in WCGAN_COLUMNS:
                percent = " %" if scale == 100 else ""
                values = [scale * row[f"{metric}_resnet20"] for row in rows]
                text += f" {{:{spec}}}{percent} [{{:{spec}}}, {{:{spec}}}] |"
                figures += [statistics.median(values), min(values), max(values)]
            yield text, *figures
        paces = result["pace"]["kimg a minute"].values()
        yield "from {:.0f} to {:.0f} thousand images a minute", min(paces), max(paces)


@PAGE.states("acceptance_per_label")
def acceptance(result: Any) -> Iterator[Statement]:
    text = "passes the acceptance test: {:.1f} % recognised, diversity {:.1f} %"
    run = result["runs"][0]
    yield text, 100 * run["recognised"], 100 * run["diversity"]


@PAGE.states("labels_scaling", "labels_queue")
def speed(scaling: Any, queue: Any) -> Iterator[Statement]:
    rates = scaling["rates"]
    yield "two workers process {:.2f} times ({:.2f} to {:.2f})", *speeds(rates["first lease to last label"]["ratio"])
    yield "{:.2f} times including start and end", rates["start of the commands to their end"]["ratio"]["median"]
    yield "Bytes sent: {:.0f}.", scaling["sent_bytes"]
    yield "{} worker processes on these two cores, {:,} labels", queue["workers"], queue["labels"]
    yield "({:.0f} s on average)", queue["label_s"]["mean"]
    shares = 100 * queue["queue_share"], 100 * queue["queue_cpu_share"], queue["queue_cpu_ms_a_label"]
    yield "takes {:.2f} % of the workers' time ({:.2f} %, {:.0f} ms per label, of processor time)", *shares
    yield "idle for {:.1f} s, {:.1f} % of {:.0f} s", queue["tail_s"], 100 * queue["tail_share"], queue["makespan_s"]
    simulated = [100 * queue["simulated"][order]["tail_share"] for order in ("label order", "shortest first")]
    yield "this would be {:.0f} %, shortest first {:.0f} %", *simulated


@GUIDE.states("labels_quality_digits", "labels_quality_fashion")
def speed_and_quality(digits: Any, fashion: Any) -> Iterator[Statement]:
    kimg = [by_case(result, "kimg") for result in (fashion, digits)]
    yield "process {:.1f} to {:.1f} times the images", *(row["per label"] / row["conditional"] for row in kimg)
    fd = by_case(digits, "all fd")
    yield "an fd of {:.3f} beside {:.3f} on the digits", fd["conditional"], fd["per label"]
