"""The figures that README and docs state, and how each follows from a file in benchmarks/results/.

    python -m benchmarks.figures    # where documents and results differ, and numbers that nothing accounts for

A function below belongs to one document and reads some results. It yields statements: a piece of the document's text
with `{}` where a figure stands, and the figures, computed from the results. tests/test_figures.py renders every
statement and finds it in its document, so a figure cannot differ from its result. All other numbers of README's
"Measured" and of docs/measurements/ are settings, dates or arithmetic (SETTINGS, NOT_MEASURED: each with its reason),
or their paragraph says that they were taken by hand.

To add a figure: commit the result, write the sentence, and yield it here with `{}` in place of the figure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from string import Formatter
from typing import Any

from benchmarks.lib.document import ROOT, Document
from benchmarks.results_table import read_result

PAGES = (
    "README.md",
    *sorted(f"docs/measurements/{path.name}" for path in (ROOT / "docs/measurements").glob("[!R]*.md")),
)
OTHER_PAGES = tuple(sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

Statement = tuple[Any, ...]  # a text with `{}`, and the figures in it


@dataclass(frozen=True)
class Source:
    """The statements of one document about some results, and the function that yields them."""

    page: str
    results: tuple[str, ...]
    statements: Callable[..., Iterator[Statement]]

    def sentences(self) -> list[str]:
        """Return the statements with the figures of the results in them."""
        statements = self.statements(*(read_result(name) for name in self.results))
        return [fill_in(text, figures) for text, *figures in statements]


SOURCES: list[Source] = []


def states(page: str, *results: str) -> Callable[[Callable[..., Iterator[Statement]]], Callable[..., Any]]:
    """Register a function that yields what `page` states of these results (names in benchmarks/results/)."""

    def register(function: Callable[..., Iterator[Statement]]) -> Callable[..., Iterator[Statement]]:
        SOURCES.append(Source(page, results, function))
        return function

    return register


def fill_in(text: str, figures: Sequence[Any]) -> str:
    places = sum(field is not None for _, field, _, _ in Formatter().parse(text))
    if places != len(figures) or not figures:
        raise ValueError(f"{len(figures)} figures for {places} places in {text!r}")
    return text.format(*figures)


def sentences_of(page: str) -> list[str]:
    return [sentence for source in SOURCES if source.page == page for sentence in source.sentences()]


def find_uncovered(page: str, document: Document) -> list[str]:
    """Return the numbers of a page that are neither stated here nor have a reason."""
    return document.find_uncovered([*sentences_of(page), *NOT_MEASURED.get(page, ())], SETTINGS)


# What several pages need ----------------------------------------------------------------------------------------------


def significant(value: float, digits: int = 3) -> float:
    return float(f"{value:.{digits}g}")


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median of the ratios of two contestants within a round."""
    return statistics.median(a / b for a, b in zip(above, below))


def speeds(measured: Any) -> tuple[float, float, float]:
    """Return a spread as median, low, high."""
    return measured["median"], *measured["ci95"]


def laboratory(result: Any, name: str) -> list[Any]:
    return result["laboratories"][name]["rows"]


def quality_row(label: str, scores: Any, to: Any = None, fd: str = ".3f") -> Statement:
    """Return a row of a table of quality: median [lowest, highest], in bold where worse than the worst seed of `to`."""
    text = f"| {label} |"
    figures: list[float] = []
    for metric, scale, spec in (("fd", 1, fd), ("recognised", 100, ".1f"), ("diversity", 100, ".1f")):
        low, middle, high = (scale * value for value in scores[metric])
        bounds = to[metric] if to else (-float("inf"), None, float("inf"))
        worse = middle > scale * bounds[2] if metric == "fd" else middle < scale * bounds[0]
        bold = "**" * worse
        percent = " %" * (metric != "fd")
        text += f" {bold}{{:{spec}}}{percent}{bold} [{{:{spec}}}, {{:{spec}}}] |"
        figures += [middle, low, high]
    return text, *figures


# README ---------------------------------------------------------------------------------------------------------------


@states("README.md", "acceptance", "ddp", "step", "lab", "gossip_lab", "teams", "quality_digits_async")
def readme(
    acceptance: Any, ddp: Any, step: Any, lab: Any, gossip: Any, teams: Any, quality: Any
) -> Iterator[Statement]:
    yield "recognises as requested | {:.1f} % |", 100 * acceptance["recognised"]
    sizes = ddp["sizes"].values()
    yield "step time against DistributedDataParallel, {:.2f}M / {:.1f}M", *(size["parameters"] / 1e6 for size in sizes)
    yield "parameters | {:.2f} / {:.2f} of its time |", *(size["ours"]["median"] for size in sizes)
    yield "Fashion-MNIST networks | {:.2f} times faster |", step["naive/fast"]["median"]
    ms = {row["wire"]: row["step_ms"] for row in laboratory(lab, "200 Mbit/s") if row["strategy"] == "sync"}
    faster = [ms["exact"] / ms[wire] for wire in ("int8", "int4", "sign")]
    yield "int8, int4, sign against float32 | {:.1f}, {:.1f}, {:.0f} times faster |", *faster
    sync, one_peer, _ = laboratory(gossip, "200 Mbit/s, 20 ms, 100k parameters")
    yield "gossip against all-reduce | {:.1f} times faster |", sync["step_ms"] / one_peer["step_ms"]
    fd = [quality["cases"][case]["fd"][1] for case in ("batches 1:1", "sync")]
    gain = teams["cases"]["digits, 1:1"]["gain measured"][0]
    yield "(fd, lower is better) | {:.2f} times faster / {:.3f} beside {:.3f} |", gain, *fd


@states("README.md", "prediction", "pipeline_congestion", "labels_quality_digits")
def readme_plan_and_data(prediction: Any, congestion: Any, labels: Any) -> Iterator[Statement]:
    summary = prediction["summary"]
    errors = 100 * summary["median_error"], 100 * summary["worst_error"]
    yield "error of {} predicted step times, median / worst | {:.0f} % / {:.0f} % |", summary["configurations"], *errors
    contestants = congestion["contestants"]
    shares = [
        100 * contestants[name]["share"] for name in ("ours", "dataloader", "dataloader, best setting", "webdataset")
    ]
    text = "ours / DataLoader / tuned in 24 s turns / webdataset | {:.1f} % / {:.0f} % / {:.0f} % / {:.0f} % |"
    yield text, *shares
    fd = {row["case"]: row["all fd"] for row in labels["rows"]}
    yield "(fd {:.3f} against {:.3f};", fd["conditional"], fd["per label"]


# docs/measurements/weak_scaling.md ------------------------------------------------------------------------------------


@states("docs/measurements/weak_scaling.md", "scale")
def scaling_of_the_paper(scale: Any) -> Iterator[Statement]:
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


@states("docs/measurements/weak_scaling.md", "scale")
def scaling_of_volunteers(scale: Any) -> Iterator[Statement]:
    volunteers = scale["volunteers"]
    yield (
        "SNGAN on CIFAR-10 ({:.1f}M parameters), {} images",
        volunteers["numbers"] / 1e6,
        volunteers["assumed"]["images"],
    )
    yield "({:.2f} s a round alone)", volunteers["alone_ms"] / 1e3
    rows = {row["name"]: row for row in volunteers["rows"] if row["workers"] == 100_000}
    for name in ("one peer", "one peer, int8", "one peer, int4, every 16th step", "random ring, int8"):
        row = rows[f"gossip, {name}"]
        speed = row["images_per_s"], 100 * row["of_alone"], row["rounds_per_h"]
        text = f"| gossip, {name} | {{:,.0f}} | {{:.1f}}% | {{:,.0f}} | {{:.2f}} GB | {{:.1f}} | {{:.0f}} |"
        yield text, *speed, row["sent_bytes_per_h"] / 1e9, row["apart"], row["mixes"]
    row = rows["gossip, ring that lags by 16"]
    speed = row["images_per_s"], 100 * row["of_alone"], row["rounds_per_h"]
    text = "| gossip, ring that lags by 16 | {:,.0f} | {:.1f}% | {:,.0f} | {:.2f} GB | {:.1f} and growing | billions |"
    yield text, *speed, row["sent_bytes_per_h"] / 1e9, row["apart"]
    row = rows["a game per label"]
    speed = row["images_per_s"], 100 * row["of_alone"], row["rounds_per_h"]
    yield "| per-label models | {:,.0f} | {:.1f}% | {:,.0f} | {:.1f} MB |", *speed, row["sent_bytes_per_h"] / 1e6
    fetch_mb = row["joiners_bytes_per_h"] / volunteers["crowd"]["leaving"] / 1e6
    yield "The fetch of a joining worker ({:.0f} MB)", fetch_mb
    (periodic,) = (row for row in volunteers["rows"] if row["workers"] == 1000 and "64th" in row["name"])
    yield "over rings of rings trains, at {:.0f} % of the speed", 100 * periodic["of_alone"]
    share = 100 * rows["gossip, one peer, int4, every 16th step"]["of_alone"]
    yield "reaches {:.0f} % of what the machines could do", share


# docs/measurements/async.md -------------------------------------------------------------------------------------------

ASYNC = "docs/measurements/async.md"


@states(ASYNC, "quality_digits_async", "quality_fashion_async")
def async_quality(digits: Any, fashion: Any) -> Iterator[Statement]:
    cases = digits["cases"]
    count = {case: sum(row["case"] == case for row in digits["rows"]) for case in cases}
    labels = {
        "sync": "sync",
        "batches 1:1": "async, batches 1:1",
        "batches 2:1": "async, batches 2:1 (`--g_batch=256`)",
        "lead 2": "`max_lead_rounds=2`",
        "lead 4": "`max_lead_rounds=4`",
        "snapshots of every fourth D": "`snapshot_every=4`",
    }
    for case, label in labels.items():
        text, *figures = quality_row(f"{label} | {{}}", cases[case], cases["sync"])
        yield text, count[case], *figures
    cases = fashion["cases"]
    count = {case: sum(row["case"] == case for row in fashion["rows"]) for case in cases}
    for case in ("sync", "batches 1:1", "batches 2:1"):
        label = labels[case].partition(" (")[0]
        text, *figures = quality_row(f"{label} | {{}}", cases[case], cases["sync"], ".2f")
        yield text, count[case], *figures


@states(ASYNC, "quality_digits_split", "quality_digits_lags", "quality_fashion_lags")
def async_divisions(split: Any, lags: Any, fashion: Any) -> Iterator[Statement]:
    fd = {row["case"]: row["fd"] for row in split["rows"]}
    two = fd["2:2, lead 2"], fd["1:3, lead 2"], fd["3:1, lead 2"]
    yield (
        "`quality_digits_split.json`: 2:2 {:.3f}; with `max_lead_rounds=2` 2:2 {:.3f}, 1:3 {:.3f}, 3:1 {:.3f})",
        fd["2:2 (auto), lead 1"],
        *two,
    )
    fd = {row["case"]: row["fd"] for row in lags["rows"]}
    seeds = [row["fd"] for row in fashion["rows"]]
    yield "(digits {:.3f}, one seed; fashion {:.2f} and {:.2f}, two", fd["alternating, optimistic"], *seeds


@states(ASYNC, "teams", "forms")
def async_speed(teams: Any, forms: Any) -> Iterator[Statement]:
    labels = {
        "digits, 1:1": "two ranks, digits, batches 1:1",
        "digits, 2:1": "two ranks, digits, batches 2:1",
        "digits, G 3 times as wide, 1:1": "two ranks, digits, G three times as wide, batches 1:1",
        "digits, G 3 times as wide, 2:1": "two ranks, the same, batches 2:1",
        "digits, G 3 times as wide, 1:4": "two ranks, the same, batches 1:4",
        "digits": "one process, digits",
        "digits, G 3 times as wide": "one process, digits, G three times as wide",
        "fashion": "one process, fashion",
    }
    for name, case in (teams["cases"] | forms["cases"]).items():
        text = f"| {labels[name]} | {{:.1f}} | {{:.2f}} | {{:.2f}} ({{:.2f}} to {{:.2f}}) |"
        yield text, case["g over d"], case["gain counted"], *case["gain measured"]


@states(ASYNC, "async_lab")
def async_slow_links(lab: Any) -> Iterator[Statement]:
    sync, fourth, second = laboratory(lab, "1 Gbit/s, 50M parameters, computing 1 s")
    yield (
        "the kernel counted {:.0f}, {:.0f} and {:.0f} MB",
        *(row["kernel_bytes"] / 1e6 for row in (sync, fourth, second)),
    )
    yield "| sync | {:.0f} | | {:.1f} MB |", sync["step_ms"], sync["sent_bytes"] / 1e6
    labels = "async, 4 and 4 ranks, `snapshot_every=4`", "the same, `snapshot_every=2`, `snapshot_wire=bf16`"
    for label, row in zip(labels, (fourth, second)):
        figures = row["step_ms"], sync["step_ms"] / row["step_ms"], row["sent_bytes"] / 1e6
        yield f"| {label} | {{:.0f}} | {{:.2f}} times as fast | {{:.1f}} MB |", *figures
    yield "Half of what `sync` sends is {:.0f} MB.", sync["sent_bytes"] / 2e6
    yield "began at a load of {:.0f}", lab["machine"]["load_before"]


@states(ASYNC, "quality_digits_lags")
def async_ages(lags: Any) -> Iterator[Statement]:
    fd = {row["case"]: row["fd"] for row in reversed(lags["rows"])}  # the first seed
    sync = lags["cases"]["alternating"]["fd"]
    optimistic = fd["alternating, optimistic"]
    text = "alternating training: {:.3f}, ten seeds from {:.3f} to {:.3f}; alternating and optimistic: {:.3f})"
    yield text, sync[1], sync[0], sync[2], optimistic
    plain = [fd[f"{ages}, plain"] for ages in ("0, 0", "1, 0", "0, 1", "2, 0", "0, 2", "4, 0", "0, 4", "8, 0")]
    yield "| without extrapolation | {:.3f} | {:.2f}, {:.2f} | {:.2f}, {:.2f} | {:.2f}, {:.2f} | {:.2f} | |", *plain
    ages = ("0, 0", "1, 0", "0, 1", "2, 0", "0, 2", "1, 1", "4, 0", "0, 4", "2, 2", "8, 0", "0, 8", "16, 0", "0, 16")
    text = (
        "| extrapolation 2 | {:.3f} | {:.3f}, {:.3f} | {:.3f}, {:.3f}, {:.3f} | {:.2f}, {:.2f}, {:.2f} "
        "| {:.2f}, {:.2f} | {:.2f}, {:.2f} |"
    )
    yield text, *(fd[age] for age in ages)
    replay = fd["0, 0"], fd["0, 0, replay"], fd["0, 0, replay a half"], fd["0, 0, uniform"]
    yield "`latest` {:.3f}, `replay` {:.3f}, with `fraction=0.5` {:.3f}, `uniform` {:.3f}.", *replay


@states(ASYNC, "quality_digits_ahead")
def async_extrapolation(ahead: Any) -> Iterator[Statement]:
    fd = {row["case"]: row["fd"] for row in ahead["rows"]}
    pairs = [fd[f"{age}, ahead {by}"] for by in ("1", "1.5", "2") for age in ("0, 0", "1, 0")]
    text = (
        "fd at ages 0 and 1: 1 gives {:.3f} and {:.3f}, 1.5 gives {:.3f} and {:.3f}, 2 gives {:.3f} and {:.3f}; "
        "at age 1, 2.5 gives {:.3f} and 3 gives {:.3f}."
    )
    yield text, *pairs, fd["1, 0, ahead 2.5"], fd["1, 0, ahead 3"]
    yield "improves alternating training to {:.3f},", fd["alternating, beta1 0"]
    text = "an age of 1 without extrapolation from {:.2f} to {:.3f}, and with an extrapolation of 1 to {:.3f}."
    yield text, fd["1, 0"], fd["1, 0, beta1 0"], fd["1, 0, ahead 1 beta1 0"]


# docs/measurements/data.md --------------------------------------------------------------------------------------------

DATA = "docs/measurements/data.md"


@states(DATA, "pipeline_congestion")
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


@states(DATA, "pipeline_decode")
def decoding(decode: Any) -> Iterator[Statement]:
    small, large = (size["contestants"] for size in decode["sizes"])

    def images_s(contestant: str) -> tuple[float, float]:
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


# docs/measurements/gossip.md ------------------------------------------------------------------------------------------

GOSSIP = "docs/measurements/gossip.md"


@states(GOSSIP, "gossip_lab")
def gossip_speed(lab: Any) -> Iterator[Statement]:
    sync, *rows = laboratory(lab, "100 Mbit/s")
    yield "| sync, exact | {:.0f} | 1 | 1 |", sync["step_ms"]
    for row in rows:
        faster, limit = (sync[key] / row[key] for key in ("step_ms", "sent_bytes"))
        spec = ".2f" if row["wire"] == "exact" else ".1f"
        text = f"| gossip, one-peer, {row['wire']} | {{:.0f}} | {{:{spec}}} | {{:{spec}}} |"
        yield text, row["step_ms"], faster, limit
    sync, *rows = laboratory(lab, "200 Mbit/s, 20 ms, 100k parameters")
    yield "| sync, exact | {:.0f} | 1 | | gossip, one-peer, exact | {:.0f} |", sync["step_ms"], rows[0]["step_ms"]
    for row in rows:
        faster = sync["step_ms"] / row["step_ms"]
        yield f"| gossip, one-peer, {row['wire']} | {{:.0f}} | {{:.1f}} |", row["step_ms"], faster
    even = laboratory(lab, "100 Mbit/s, computing 0.5 s, 500k parameters")
    uneven = laboratory(lab, "one link of 10 Mbit/s, the same")
    for label, one, other in zip(("sync, exact", "async-gossip, ring, exact"), even, uneven):
        kept = 100 * one["step_ms"] / other["step_ms"]
        yield f"| {label} | {{:.0f}} | {{:.0f}} | {{:.0f}} % |", one["step_ms"], other["step_ms"], kept
    yield "takes as long as {:.1f} MB at 10 Mbit/s", uneven[0]["sent_bytes"] / 1e6


@states(GOSSIP, "gossip_lab")
def gossip_load(lab: Any) -> Iterator[Statement]:
    apart = lab["laboratories"]["200 Mbit/s, 20 ms, 100k parameters"]["machine"]
    loads = lab["machine"]["load_before"], apart["load_before"]
    yield "The runs began at a load of {:.0f} from other work, those at 20 ms at one of {:.0f}", *loads


@states(
    GOSSIP, "quality_digits_gossip4", "quality_digits_gossip8", "quality_fashion_gossip4", "quality_fashion_gossip8"
)
def gossip_quality(digits4: Any, digits8: Any, fashion4: Any, fashion8: Any) -> Iterator[Statement]:
    for ranks, result, fd in ((4, digits4, ".3f"), (8, digits8, ".3f"), (4, fashion4, ".2f"), (8, fashion8, ".2f")):
        cases = result["cases"]
        yield quality_row(f"{ranks} ranks: sync", cases["sync"], cases["sync"], fd)
        for case in ("one-peer", "ring", "random-ring"):
            yield quality_row(case, cases[case], cases["sync"], fd)
    yield quality_row("one-peer, int8", digits4["cases"]["one-peer, int8"], digits4["cases"]["sync"])
    cases = fashion8["cases"]
    yield quality_row("one-peer, both rates times 2.8", cases["one-peer, rates x 2.8"], cases["sync"], ".2f")
    one = cases["CP-OAdam"]
    text = "| CP-OAdam (one seed) | {:.2f} | {:.1f} % | **{:.1f} %** |"
    yield text, one["fd"][1], 100 * one["recognised"][1], 100 * one["diversity"][1]


@states(GOSSIP, "survive")
def lost_ranks(survive: Any) -> Iterator[Statement]:
    labels = {
        "killed-0": "rank 0, killed (SIGKILL)",
        "killed-2": "rank 2, killed (SIGKILL)",
        "frozen-0": "rank 0, frozen (SIGSTOP), then continued",
        "frozen-3": "rank 3, frozen (SIGSTOP), then continued",
        "cut-3": "rank 3, cut off (its link taken down, later up again)",
    }
    for row in survive["rows"]:
        text = f"| {labels[row['case']]} | {{:.1f}} s | {{:.1f}} % | {{:.1f}} % |"
        yield text, row["pause_s"], 100 * row["recognised"], 100 * row["diversity"]


# docs/measurements/health.md ------------------------------------------------------------------------------------------

HEALTH = "docs/measurements/health.md"


@states(HEALTH, "health_planted")
def planted_failures(planted: Any) -> Iterator[Statement]:
    rows: dict[str, list[Any]] = {}
    for row in planted:
        rows.setdefault(row["failure"], []).append(row)

    def count_and_images(failure: str) -> tuple[int, int]:
        return len(rows[failure]), max(row["images"] for row in rows[failure])

    def value(failure: str, least: Callable[[list[float]], float], key: str = "") -> float:
        return least([row["value"] for row in rows[failure] if key in row["key"]])

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
    yield text, seeds, value(failure, max, "moved"), value(failure, min, "accuracy"), images
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
    stalled = [sum(word in row["all"] for row in planted if "x 100" in row["failure"]) for word in ("won", "stalled")]
    yield "(`d_saturated` with {} of the seeds and `stalled` with {}, some kimg later)", *stalled


@states(HEALTH, "health_healthy")
def healthy_runs(healthy: Any) -> Iterator[Statement]:
    longest = {row["run"]: row["longest_step"]["D"] for row in healthy}
    optimistic = [step for run, step in longest.items() if "quantized" in run or "gossip" in run]
    others = [step for run, step in longest.items() if not any(k in run for k in ("quantized", "gossip", "async"))]
    yield "longest step of the healthy runs below was {:.2f} of D's norm", max(longest.values())
    yield "(the first step of `async`), {:.2f} with `gossip` and `quantized`", max(optimistic)
    yield "and at most {:.2f} elsewhere.", max(others)
    yield "healthy runs of 40 kimg with {} checks each", statistics.mode(row["lines"] for row in healthy)
    yield "by 2 workers ({} checks)", max(row["lines"] for row in healthy)


# docs/measurements/networks.md ----------------------------------------------------------------------------------------

NETWORKS = "docs/measurements/networks.md"


@states(NETWORKS, "networks_step")
def networks_speed(result: Any) -> Iterator[Statement]:
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


@states(NETWORKS, "networks_step_bf16")
def networks_speed_bf16(result: Any) -> Iterator[Statement]:
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


@states(NETWORKS, "memory", "memory_bf16", "memory_predicted")
def networks_memory(float32: Any, bf16: Any, predicted: Any) -> Iterator[Statement]:
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


@states("docs/models.md", "graphs")
def differences_of_exported_graphs(graphs: Any) -> Iterator[Statement]:
    onnx, torch_export = (
        max(row["apart"] for row in graphs["rows"] if row["form"] == form) for form in ("onnx", "torch-export")
    )
    yield "differ by at most {} in ONNX and {:.0f} in torch.export", f"{onnx:.0e}".replace("e-0", "e-"), torch_export


@states("docs/networks.md", "memory", "memory_bf16")
def networks_memory_foreseen(float32: Any, bf16: Any) -> Iterator[Statement]:
    ratios = {name: case["ratio"] for name, case in (float32["cases"] | bf16["cases"]).items()}
    biggan = max(abs(ratio - 1) for name, ratio in ratios.items() if "biggan-imagenet1024" in name)
    yield "was within {:.0f} % of what processes used for `biggan-imagenet1024`", math.ceil(100 * biggan)
    (sngan,) = (ratio for name, ratio in ratios.items() if "sngan" in name)
    yield "and {:.0f} % above it for `sngan-cifar10`", 100 * (sngan - 1)


@states(NETWORKS, "quality_sngan", "quality_sngan_bf16", "quality_biggan")
def networks_quality(sngan: Any, sngan_bf16: Any, biggan: Any) -> Iterator[Statement]:
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


# docs/measurements/per_label.md ---------------------------------------------------------------------------------------

PER_LABEL = "docs/measurements/per_label.md"


@states(PER_LABEL, "labels_quality_digits", "labels_quality_fashion")
def per_label_quality(digits: Any, fashion: Any) -> Iterator[Statement]:
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
        kimg = {row["case"]: row["kimg"] for row in result["rows"]}
        ratios.append(kimg["per label"] / kimg["conditional"])
    yield "process {:.1f} to {:.1f} times the images", *ratios
    yield "it saw {:.0f} to {:.0f} % fewer images", *(100 - 100 / ratio for ratio in ratios)
    steps = [row["steps"] for row in digits["rows"] if "per label, W-CGAN" in row["case"]]
    yield "{:,.0f} to {:,.0f} steps of G are few", *(significant(count, 2) for count in steps)


@states(PER_LABEL, "acceptance_per_label")
def per_label_acceptance(result: Any) -> Iterator[Statement]:
    text = "passes the acceptance test: {:.1f} % recognised, diversity {:.1f} %"
    yield text, 100 * result["recognised"], 100 * result["diversity"]


@states(PER_LABEL, "labels_scaling", "labels_queue")
def per_label_speed(scaling: Any, queue: Any) -> Iterator[Statement]:
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


# docs/measurements/policies.md ----------------------------------------------------------------------------------------


@states("docs/measurements/policies.md", "quality_fashion_policies")
def policies(result: Any) -> Iterator[Statement]:
    cases = result["cases"]
    seconds = {row["case"]: row["seconds"] for row in reversed(result["rows"])}  # of seed 0

    def middle(case: str, *metrics: str) -> list[float]:
        return [cases[case][metric][1] * (1 if metric == "fd" else 100) for metric in metrics]

    text = "| the recipe: Adam 5e-4 and 1e-3, (0.5, 0.99) | | | | {:.0f} | {:.2f} | {:.1f} % |"
    yield text, seconds["recipe"], *middle("recipe", "fd", "recognised")
    specs = {
        "ttur": (".1f", ".2f", " (the recipe)"),
        "biggan": (".1f", ".1f", ""),
        "sngan": (".1f", ".1f", ""),
        "paragan": (".2f", ".2f", ""),
        "optimistic": (".1f", ".2f", ""),
    }
    for policy, (published, of_recipe, remark) in specs.items():
        text = f"| `{policy}` | {{:{published}}} | {{:.1f}} % | {{:.1f}} % | {{:.0f}} "
        text += f"| {{:{of_recipe}}}{remark} | {{:.1f}} % |"
        rates = middle(f"{policy}, rates of the recipe", "fd", "recognised")
        yield text, *middle(policy, "fd", "recognised", "diversity"), seconds[policy], *rates


@states("docs/measurements/policies.md", "quality_digits_paper")
def paper_updates(result: Any) -> Iterator[Statement]:
    for case in ("DPOSG", "DQGAN"):
        yield quality_row(case, result["cases"][case])


# docs/measurements/prediction.md --------------------------------------------------------------------------------------

PREDICTION = "docs/measurements/prediction.md"


@states(PREDICTION, "prediction", "prediction_again")
def prediction_errors(first: Any, second: Any) -> Iterator[Statement]:
    summaries = first["summary"], second["summary"]
    yield "| configurations | 40 | {} | {} |", *(summary["configurations"] for summary in summaries)
    yield "| median error | 10 % | {:.1f} % | {:.1f} % |", *(100 * summary["median_error"] for summary in summaries)
    yield "| worst error | 25 % | {:.1f} % | {:.1f} % |", *(100 * summary["worst_error"] for summary in summaries)
    within = [sum(abs(row["error"]) <= most for row in one["rows"]) for one in (first, second) for most in (0.1, 0.25)]
    yield "| within 10 % / within 25 % | | {} / {} | {} / {} |", *within
    yield "| 9 of 10 | {} | {} |", *(summary["choices_right"] for summary in summaries)
    errors = [
        {(row["network"], row["strategy"]): -100 * row["error"] for row in one["rows"]} for one in (first, second)
    ]
    duplex = [one["found"]["links"]["duplex_efficiency"] for one in first["laboratories"].values()]
    yield "both directions at once reach {:.2f} to {:.2f} of the rate", min(duplex), max(duplex)
    pair = [error["2 hosts, 200 Mbit/s, 10 ms", f"sync+{wire}"] for error in errors for wire in ("bf16", "int8")]
    yield "at 10 ms ({:.0f} to {:.0f} % in both measurements)", min(pair), max(pair)
    slow = [error["4 hosts, 20 Mbit/s, 1 ms", "sync+int8"] for error in errors]
    yield "`int8` at 20 Mbit/s ({:.0f} and {:.0f} %)", *slow
    fast = errors[0]["2 hosts, 1 Gbit/s", "quantized+sign"]
    eight = errors[0]["8 hosts, 50 Mbit/s, 2 ms", "sync+int4"]
    yield "between eight hosts ({:.0f} and {:.0f} % in the first)", fast, eight


@states(PREDICTION, "prediction_scaling")
def prediction_of_scaling(scaling: Any) -> Iterator[Statement]:
    names = {"async+lead=2": "async+max_lead_rounds=2"}
    rows = [scaling["hosts"][hosts]["rows"] for hosts in ("2", "4", "8")]
    for of_hosts in zip(*rows):
        strategy = of_hosts[0]["strategy"]
        figures = [100 * row[key] for row in of_hosts for key in ("measured", "predicted")]
        cells = " | ".join(["{:.0f}% ({:.0f}%)"] * 3)
        yield f"| {names.get(strategy, strategy)} | {cells} |", *figures


@states(PREDICTION, "auto")
def choice_of_auto(auto: Any) -> Iterator[Statement]:
    one, two, four = auto["rows"]
    again, _, later_two, later_four = auto["again"]

    def ms(row: Any) -> list[float]:
        return sorted(1000 * seconds for seconds in row["seconds"].values())

    yield "fastest and chosen ({:.1f} ms a round, `sync` {:.1f})", *ms(one)
    yield "({:.1f} ms, the next {:.1f})", *ms(four)[:2]
    yield "and {:.1f} % slower than one of them when all ran afterwards", 100 * two["slower"]
    yield (
        "are within {:.0f} % there ({:.1f} to {:.1f} ms)",
        100 * (ms(again)[4] / ms(again)[0] - 1),
        ms(again)[0],
        ms(again)[4],
    )
    yield "strategies {:.1f} and {:.1f} % slower", 100 * later_two["slower"], 100 * later_four["slower"]
    figures = [ms_of for row in (later_two, later_four) for ms_of in (1000 * row["seconds"][row["chosen"]], ms(row)[0])]
    yield "({:.1f} and {:.1f} ms, {:.1f} and {:.1f})", *figures


# docs/measurements/quantized.md ---------------------------------------------------------------------------------------

QUANTIZED = "docs/measurements/quantized.md"


@states(QUANTIZED, "quality_digits_sync", "quality_fashion_sync")
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


@states(QUANTIZED, "quality_fashion_int4_block256")
def quality_of_larger_blocks(fashion: Any) -> Iterator[Statement]:
    yield "with blocks of 256 and full feedback, fashion had an fd of {:.2f}", fashion["cases"]["int4"]["fd"][1]


@states("docs/quantized.md", "quality_fashion_int4_block256", "quality_fashion_sync")
def feedback_of_int4(former: Any, now: Any) -> Iterator[Statement]:
    fd = former["cases"]["int4"]["fd"][1], now["cases"]["int4"]["fd"][1]
    yield "Fashion-MNIST had an fd of {:.2f}, against {:.2f} with the defaults", *fd


@states(QUANTIZED, "quality_digits_quantized")
def quality_of_quantized(result: Any) -> Iterator[Statement]:
    int8, exact = result["cases"]["int8"], result["cases"]["exact"]
    figures = int8["fd"][0], int8["fd"][2], exact["fd"][0], exact["fd"][2]
    yield "fd {:.3f} to {:.3f} with `int8`, {:.3f} to {:.3f} with the exact wire", *figures
    yield "{:.1f} % and {:.1f} % recognised", *(100 * scores["recognised"][1] for scores in (int8, exact))


@states(QUANTIZED, "lab")
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


@states(QUANTIZED, "wires")
def coding(wires: Any) -> Iterator[Statement]:
    ratios = [figure for wire in ("int8", "int4", "sign") for figure in speeds(wires["times"][wire]["ratio to copy"])]
    yield "int8 {:.2f} ({:.2f} to {:.2f}), int4 {:.2f} ({:.2f} to {:.2f}), sign {:.2f} ({:.2f} to {:.2f})", *ratios


# docs/measurements/scores.md ------------------------------------------------------------------------------------------


@states("docs/measurements/scores.md", "scores", "scores_prdc")
def speed_of_scores(scores: Any, alone: Any) -> Iterator[Statement]:
    seconds = list(scores["fd"]["seconds"].values())  # ours, of which the distance, scipy's, products, eigenvalues
    rows, columns = scores["fd"]["features"]
    text = (
        "| Fréchet distance of {:,} x {} features, reference known | {:.1f} s, of which the distance {:.1f} "
        "| {:.1f} s, scipy's `sqrtm` | {:.1f} s, the product of all rows; {:.1f} s, eigenvalues |"
    )
    yield text, rows, columns, *seconds
    ours, products = scores["prdc"]["seconds"].values()
    text = "coverage of {:,} x {:,} x {} | {:.0f} s | | {:.1f} s, the products of all pairs |"
    yield text, *scores["prdc"]["features"], ours, products
    yield "differs from scipy's by {:.1e} of its value", scores["fd"]["differs_from_scipy"]
    ours, products = alone["prdc"]["seconds"].values()
    yield "precision to coverage take {:.1f} s, of which {:.1f} s are products", ours, products
    yield "and {:.0f} MB in addition to the features", alone["prdc"]["peak_bytes_beyond_features"] / 1e6


# docs/measurements/tuning.md ------------------------------------------------------------------------------------------

TUNING = "docs/measurements/tuning.md"


@states(TUNING, "layout")
def tuning(result: Any) -> Iterator[Statement]:
    labels = {
        "digits": "digits, 8 px | 128",
        "fashion": "Fashion-MNIST, DCGAN 32 px | 32",
        "sngan": "SNGAN, CIFAR-10 | 16, one step of D",
        "dcgan": "DCGAN, CIFAR-10 | 64, five steps of D",
    }
    gains = {
        "digits": "both cores {:.2f}, bf16 {:.2f}, capture_passes {:.2f}",
        "fashion": "capture_passes {:.2f}",
        "sngan": "capture_passes {:.2f}",
        "dcgan": "concat_real_fake {:.2f}, capture_passes {:.2f}",
    }
    for name, label in labels.items():
        network = result["networks"][name]
        times = {contestant: one["rounds"] for contestant, one in network["times"].items()}
        defaults = speeds(network["times"]["defaults"]["ratio to plain"])
        defaults = 1 / defaults[0], 1 / defaults[2], 1 / defaults[1]
        stages = [times["defaults"], *(rounds for contestant, rounds in times.items() if contestant.startswith("+"))]
        steps = [median_ratio(before, after) for before, after in pairwise(stages)]
        cell = "{:.2f} [{:.2f}, {:.2f}]"
        plain = network["times"]["plain"]["ms"]["median"]
        ms = "{:.1f}" if plain < 100 else "{:,.0f}"
        text = f"| {label} | {ms} | {cell} | {cell} | {cell} | {gains[name]} | {cell} |"
        kept, tuned, alone = (speeds(network[f"plain/{which}"]) for which in ("kept", "decided", "alone"))
        yield text, plain, *kept, *defaults, *tuned, *steps, *alone
    bounds = [result["networks"][name]["plain/alone"]["median"] for name in ("digits", "dcgan")]
    yield "allow a factor of {:.2f} for `digits` and of {:.2f} for DCGAN on CIFAR-10", *bounds
    digits, fashion = (result["networks"][name]["all"] for name in ("digits", "fashion"))
    figures = *speeds(digits["decided/best"]), digits["combinations"], *speeds(fashion["decided/best"])
    text = (
        "the tuned choice took {:.2f} [{:.2f}, {:.2f}] of the time of the fastest of {} for digits, "
        "and {:.2f} [{:.2f}, {:.2f}] of the fastest of {} for Fashion-MNIST"
    )
    yield text, *figures, fashion["combinations"]
    seconds = sorted(network["decided_s"] for network in result["networks"].values())
    yield "Tuning takes {:.0f}, {:.0f}, {:.0f} and {:.0f} s, once.", *(seconds[i] for i in (0, 1, 3, 2))


@states(TUNING, "networks_step_bf16")
def tuning_at_the_published_batch(result: Any) -> Iterator[Statement]:
    names = "sngan", "biggan", "sagan", "contragan"
    faster = [result["step"][name]["times faster"]["ours, bf16"]["median"] for name in names]
    yield "the defaults were {:.2f} (SNGAN), {:.2f} (BigGAN), {:.2f} (SAGAN) and {:.2f} (ContraGAN) times", *faster


@states(TUNING, "convolutions")
def rates_of_convolutions(result: Any) -> Iterator[Statement]:
    rates = result["tflops"]
    down = rates["digits, 4x4 down"]
    text = "reach {:.2f} TFLOP/s forward, where a product of large matrices reaches {:.2f}, but {:.2f} and {:.2f} in"
    yield text, down["forward"], result["product"], down["of the images"], down["of the weights"]
    at_image = [rate for key, rate in rates["digits, at the image"].items() if key != "as a product"]
    yield "the 3x3 ones at the image {:.2f} to {:.2f}", min(at_image), max(at_image)
    second = rates["CIFAR-10, the next"]
    figures = down["as a product"], second["as a product"], second["of the weights"]
    yield "unfolded images reached {:.2f} there, and {:.2f} instead of {:.2f} in CIFAR-10's second layer", *figures


# Numbers that are no results: what a pattern matches, and why it is none.
COUNTED = (
    "ranks?|hosts?|workers?|seeds?|images|fakes|labels|steps|rounds|bytes|channels|kimg|px|threads|cores|parameters"
    "|home computers|configurations|directions|times at random"
)
SETTINGS = {
    r"torch 2\.\d+": "a version",
    r"20\d\d-\d\d-\d\d": "a date",
    r"CIFAR-10\b": "a name",
    r"\b1e-4\b": "a learning rate",
    rf"\b[\d,.]+[Mk]?(?:(?:,| to|, and| and) [\d,.]+)* (?:{COUNTED})\b": "a size of the run",
    r"\bseeds? \d+(?:(?:,| and) \d+)*": "seeds",
    r"\b(?:batch|width|w =) [\d.]+": "a setting of the run",
    r"\b[\d.]+ [MGk]bit/s": "a rate of an emulated link",
    r"\b[\d.]+(?: to [\d.]+)? ms(?: one way|,? one of them with)": "a latency of an emulated link",
    r"95 % interval": "a confidence interval",
}

# Other sentences with numbers that follow from no result, and why.
NOT_MEASURED: dict[str, dict[str, str]] = {
    "README.md": {"200 Mbit/s, 20 ms, 100k": "settings"},
    "docs/measurements/claims.md": {
        "Figure 5 runs as printed": "a name",
        "more than 30 % throughput": "the paper's",
        "BigGAN from 15 days to 14 hours, 91 % scaling efficiency at 1,024 workers": "the paper's",
        "1024 x 1024 with BigGAN": "the paper's",
        "algorithm 2 for several wires": "a name",
        "a difference at 8 bits": "a setting",
        "weak scaling to 2,000 GPUs": "the paper's",
        "| 2,000 GPUs |": "the paper's",
        "CIFAR-100": "a name",
    },
    "docs/measurements/async.md": {
        "+ 2 d forward + 4 d backward | r (g forward + 2 g backward": "counted",
        "d backward to the inputs only) | 12 |": "counted",
        "| every rank trains both | 2 d forward + 4 d backward | the same | 11 |": "counted",
        "| teams | 6 d, on the ranks of D | r (3 g + 2 d), on the ranks of G | the larger of 6 and 5 |": "counted",
        "each is busy with 6 or 5 of what would be 6 on both": "counted",
        "Below 1, one network": "a ratio of one",
        "1 s of emulated computing": "a setting",
        "A rank of D sends 150 MB of gradients (a sum over 4 ranks), so 25 MB a round are left": "arithmetic of bytes",
        "beta1 of 0 instead of the recipe's 0.5": "settings",
    },
    "docs/measurements/data.md": {
        "bursts of 2 to 5 s with pauses of 2 to 4 s. A step of 300 ms": "settings",
        "(limit: 1 GiB)": "a setting",
        "batches of 64": "a setting",
        "turns of 24 s": "a setting",
        "over 60 s": "a setting",
        "[64, 3, R, R] in [-1, 1]": "a shape",
        "[64, R, R, 3]": "a shape",
    },
    "docs/measurements/gossip.md": {
        "A ring all-reduce of eight ranks is 14 hops of 20 ms": "arithmetic of hops",
        "With both rates times 2.8, the square root of 8,": "settings",
    },
    "docs/measurements/health.md": {
        "`noisy_label` 3 |": "a label",
        "sync on 1 and on 2 ranks; an int4 wire on 2;": "settings",
        "quantized (int8) on 2; gossip on 2; async on 1; G and D on different ranks on 2;": "settings",
        "one sum over ranks of 16 kB (8 bytes for each of 2 x 1,024 weights)": "arithmetic of bytes",
        "two norms of 1,024 weights": "a setting",
    },
    "docs/measurements/networks.md": {"8 channels in G, 16 in D": "settings", "Seed 0 in float32": "a seed"},
    "docs/measurements/per_label.md": {
        "with labels of 1 s": "a thought",
        "(160 kimg, 16 per label)": "settings",
        "`label`: 500 images": "a setting",
    },
    "docs/measurements/policies.md": {"(937 rounds": "arithmetic of a batch", "decays to 0": "a limit"},
    "docs/measurements/prediction.md": {
        "0 to 50 ms": "settings",
        "above 0 ms a relay": "a setting",
        "a token bucket passes 128 KB": "a property of Linux",
        "whose shortest timeout is 200 ms": "a property of TCP",
        "or within 5 % of it": "the target",
        "All errors above 10 %": "the target",
        "400 ms of computing": "a setting",
        "Above 100 %": "a limit",
        "on 1, 2 and 4 ranks": "settings",
    },
    "docs/measurements/quantized.md": {
        "(exact and int8: 0 to 4;": "seeds",
        "0.5 for `int4` and `sign`, else 1": "settings",
        "a share of 99.5 % is known to 0.2 %": "the standard deviation of a share",
        "blocks of 64 numbers and all 16 levels in use; with blocks of 256": "settings",
        "At 20 ms one way": "a setting",
        "8 million numbers": "a setting",
        "1, 2, 4 and 8 workers": "settings of a test",
    },
    "docs/measurements/tuning.md": {
        "the 4x4 convolutions with stride 2": "settings",
        "(64, five steps of D)": "settings",
        "the 3x3 ones": "a setting",
    },
    "docs/measurements/weak_scaling.md": {
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
}


def main() -> None:
    for source in SOURCES:
        for sentence in Document.read(source.page).find_missing(source.sentences()):
            print(f"{source.page} ({source.statements.__name__}): {sentence}")
    for page in PAGES:
        for number in find_uncovered(page, Document.read(page)):
            print(f"{page}: nothing accounts for {number}")
    for page in OTHER_PAGES:
        for measurement in Document.read(page).find_measurements(sentences_of(page)):
            print(f"{page}: looks measured: {measurement}")


if __name__ == "__main__":
    main()
