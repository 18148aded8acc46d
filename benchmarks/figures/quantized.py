"""State the figures of docs/measurements/quantized.md, and of docs/quantized.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement, laboratory, quality_row, significant, speeds

PAGE = Page(
    "docs/measurements/quantized.md",
    not_measured={
        "(exact and int8: 0 to 4;": "seeds",
        "0.5 for `int4` and `sign`, else 1": "settings",
        "a share of 99.5 % is known to 0.2 %": "the standard deviation of a share",
        "blocks of 64 numbers and all 16 levels in use; with blocks of 256": "settings",
        "At 20 ms one way": "a setting",
        "a sign keeps 2/pi of the information": "theory",
        "8 million numbers": "a setting",
        "1, 2, 4 and 8 workers": "settings of a test",
    },
)
GUIDE = Page("docs/quantized.md")


@PAGE.states("quality_digits_sync", "quality_fashion_sync")
def quality_of_wires(digits: Any, fashion: Any) -> Iterator[Statement]:
    labels = {
        "exact": "exact",
        "int8": "int8",
        "int4": "int4 (feedback 0.5)",
        "int4, feedback 0": "int4, no feedback",
        "int2": "int2",
        "sign": "sign (feedback 0.5)",
        "sign, feedback 0": "sign, no feedback",
        "sign, feedback 1": "sign, feedback 1",
    }
    for result, specs in ((digits, {"sign, feedback 1": ".2f"}), (fashion, dict.fromkeys(labels, ".2f"))):
        cases = result["cases"]
        for case, scores in cases.items():
            yield quality_row(labels[case], scores, cases["exact"], specs.get(case, ".3f"))
    yield "recognises {:.0f} % of unseen real Fashion-MNIST images", 100 * fashion["real images recognised"]
    outside = digits["cases"]["int8"]["recognised"][1], digits["cases"]["exact"]["recognised"][0]
    yield (
        "the one number outside, {:.1f} % against {:.1f} %, is one image of 1,000",
        *(100 * share for share in outside),
    )


@PAGE.states("quality_fashion_int4_block256")
def quality_of_larger_blocks(fashion: Any) -> Iterator[Statement]:
    yield "with blocks of 256 and full feedback, fashion had an fd of {:.2f}", fashion["cases"]["int4"]["fd"][1]


@GUIDE.states("quality_fashion_int4_block256", "quality_fashion_sync")
def feedback_of_int4(former: Any, now: Any) -> Iterator[Statement]:
    fd = former["cases"]["int4"]["fd"][1], now["cases"]["int4"]["fd"][1]
    yield "Fashion-MNIST had an fd of {:.2f}, against {:.2f} with the defaults", *fd


@PAGE.states("quality_digits_quantized", "quality_fashion_quantized")
def quality_of_quantized(digits: Any, fashion: Any) -> Iterator[Statement]:
    for result, fd in ((digits, ".3f"), (fashion, ".2f")):
        for case, scores in result["cases"].items():
            label = "CPOAdam, exact" if case == "exact" else f"quantized, {case}"
            yield quality_row(label, scores, result["cases"]["exact"], fd)


@PAGE.states("mixture_wires")
def mixture_of_gaussians(result: Any) -> Iterator[Statement]:
    rows = {row["case"]: row for row in result["rows"]}
    close = {case: 100 * row["close"] for case, row in rows.items()}
    for case, row in rows.items():
        yield f"| {case} | {{:.1f}} % | {{:.0f}} |", close[case], row["sent_bytes"] / 1e6
    yield "Every case covers {:g} of 8 modes", min(row["modes"] for row in rows.values())
    signs = "quantized, sign", "CPOAdam-GQ, sign", "DQGAN, sign", "DQGAN, sign, feedback 0", "CPOAdam", "DQGAN, exact"
    text = (
        "optimistic Adam puts {:.1f} % of the points close with feedback and {:.1f} % without, "
        "gradient steps {:.1f} % and {:.1f} %; the exact wire reaches {:.1f} % and {:.1f} %"
    )
    yield text, *(close[case] for case in signs)
    pairs = ("quantized, int8", "CPOAdam-GQ, int8"), ("DQGAN, int8", "DQGAN, int8, feedback 0")
    yield "differ by at most {:.1f} points in 100", max(abs(close[a] - close[b]) for a, b in pairs)


@PAGE.states("lab")
def speed_of_wires(lab: Any) -> Iterator[Statement]:
    exact, *rows = laboratory(lab, "200 Mbit/s")
    link_ms = 8 * exact["sent_bytes"] / 200e3
    text = "| sync, exact | {:.0f} | 1 | 1 (the link alone: {:.0f} ms) | + {:.1f} % |"
    yield text, exact["step_ms"], link_ms, 100 * (exact["kernel_bytes"] / exact["sent_bytes"] - 1)
    for row in rows:
        faster, limit = (significant(exact[key] / row[key]) for key in ("step_ms", "sent_bytes"))
        more = 100 * (row["kernel_bytes"] / row["sent_bytes"] - 1)
        yield (
            f"| {row['strategy']}, {row['wire']} | {{:.0f}} | {{:g}} | {{:g}} | + {{:.1f}} % |",
            row["step_ms"],
            faster,
            limit,
            more,
        )
    labels = "float32", "its fp16 hook", "PowerSGD, rank 1", "PowerSGD, rank 4"
    for label, row in zip(labels, laboratory(lab, "200 Mbit/s, torch"), strict=True):
        faster = significant(exact["step_ms"] / row["step_ms"])
        yield f"| DistributedDataParallel, {label} | {{:.0f}} | {{:g}} | | |", row["step_ms"], faster
    for links in ("200 Mbit/s, 20 ms", "one link of 20 Mbit/s"):
        exact, int8, sign = (row["step_ms"] for row in laboratory(lab, links))
        figures = exact, int8, exact / int8, sign, significant(exact / sign, 2)
        yield f"| {links} | {{:.0f}} ms | {{:.0f}} ms ({{:.1f}}) | {{:.0f}} ms ({{:g}}) |", *figures
    for row in laboratory(lab, "200 Mbit/s, computing 1 s"):
        share = 100 * row["overlap"], 100 * row["efficiency"]
        yield f"| {row['strategy']}, {row['wire']} | {{:.0f}} | {{:.0f}} % | {{:.0f}} % |", row["step_ms"], *share
    int4 = next(row for row in rows if row["wire"] == "int4")
    yield "of its {:.0f} ms beyond the link", int4["step_ms"] - 8 * int4["sent_bytes"] / 200e3


@PAGE.states("wires")
def coding(wires: Any) -> Iterator[Statement]:
    ratios = [figure for wire in ("int8", "int4", "sign") for figure in speeds(wires["times"][wire]["ratio to copy"])]
    yield "int8 {:.2f} ({:.2f} to {:.2f}), int4 {:.2f} ({:.2f} to {:.2f}), sign {:.2f} ({:.2f} to {:.2f})", *ratios


@GUIDE.states("lab", "quality_digits_quantized", "quality_fashion_quantized")
def speed_and_quality(lab: Any, digits: Any, fashion: Any) -> Iterator[Statement]:
    ms = {row["wire"]: row["step_ms"] for row in laboratory(lab, "200 Mbit/s") if row["strategy"] == "sync"}
    faster = [ms["exact"] / ms[wire] for wire in ("int8", "int4", "sign")]
    text = "over int8 is {:.1f} times faster than over float32, over int4 {:.1f}, over `sign` {:.0f} times faster"
    yield text, *faster
    fd = [digits["cases"][case]["fd"][1] for case in ("int8", "exact")]
    yield "the digits end at an fd of {:.3f} over int8, beside {:.3f} over the exact wire", *fd
    fd = [fashion["cases"][case]["fd"][1] for case in ("int4", "exact")]
    yield "Fashion-MNIST at {:.2f} over int4, beside {:.2f}", *fd
