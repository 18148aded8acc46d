"""State the figures of docs/measurements/reconstruction.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.figures.registry import Page, Statement

PAGE = Page(
    "docs/measurements/reconstruction.md",
    not_measured={
        "16 to 32 px": "sizes",
        "8 x 8 tokens of 512 codes": "sizes",
        "of the 50,000 training images": "a size",
        "The target was 1.3": "a target",
        "The first 16 test images": "of the picture",
        "the 64 features of a ResNet-20": "sizes",
        "Scores of the 1,000 test images": "a size",
        "digits of six speakers at 8 kHz": "of the data",
        "2,700 recordings to train on and 300 held out": "sizes",
        "segments of 2,048 samples": "a field of the recipe",
        "| real | 0 | 0 |": "distances of a recording from itself",
        "Griffin-Lim, 32 iterations": "a setting",
    },
)
VOCODED = {"Griffin-Lim": "Griffin-Lim, 32 iterations", "vocoder": "vocoder"}
PLAIN, ADVERSARIAL = "L1", "L1 + adversarial"
PERCEPTUAL, FULL = "L1 + perceptual", "L1 + perceptual + adversarial"


@PAGE.states("super_resolution")
def super_resolution(result: Any) -> Iterator[Statement]:
    rows = result["rows"]
    for name in ("bicubic", PLAIN, ADVERSARIAL):
        row = rows[name]
        scores = row["psnr"], row["fd_resnet20"], 100 * row["accuracy"]
        yield f"| {name} | {{:.2f}} | {{:.2f}} | {{:.1f}} % |", *scores
    yield "| the data | | 0 | {:.1f} % |", 100 * rows["the data"]["accuracy"]
    lost = rows[PLAIN]["psnr"] - rows[ADVERSARIAL]["psnr"]
    ratio = rows[PLAIN]["fd_resnet20"] / rows[ADVERSARIAL]["fd_resnet20"]
    yield "{:.2f} dB of PSNR, and divides `fd_resnet20` by {:.1f}.", lost, ratio


@PAGE.states("tokenizer")
def tokenizer(result: Any) -> Iterator[Statement]:
    rows = result["rows"]
    for name in (PLAIN, PERCEPTUAL, FULL):
        row = rows[name]
        scores = row["psnr"], row["fd_resnet20"], 100 * row["accuracy"], row["codes_in_use"], row["perplexity"]
        yield f"| {name} | {{:.2f}} | {{:.2f}} | {{:.1f}} % | {{:.0f}} | {{:.0f}} |", *scores
    yield "| the data | | 0 | {:.1f} % | | |", 100 * rows["the data"]["accuracy"]
    lost = rows[PERCEPTUAL]["psnr"] - rows[FULL]["psnr"]
    lower = 100 * (1 - rows[FULL]["fd_resnet20"] / rows[PERCEPTUAL]["fd_resnet20"])
    yield "costs {:.2f} dB beside the perceptual one, and lowers `fd_resnet20` by {:.0f} %", lost, lower


@PAGE.states("vocoder")
def vocoder(result: Any) -> Iterator[Statement]:
    rows = result["rows"]
    yield "the recipe, {:.0f},000 segments", result["kimg"]
    yield "| real | 0 | 0 | {:.1f} % |", 100 * rows["real"]["recognised"]
    for name in ("Griffin-Lim", "vocoder"):
        row = rows[name]
        scores = row["log_mel"], row["stft"], 100 * row["recognised"]
        yield f"| {VOCODED[name]} | {{:.3f}} | {{:.3f}} | {{:.1f}} % |", *scores
    yield "recognised {:.1f} points less often", 100 * (rows["real"]["recognised"] - rows["vocoder"]["recognised"])


@PAGE.states("reconstruction_speed")
def speed(result: Any) -> Iterator[Statement]:
    for name, row in result["recipes"].items():
        ratio, rates = row["plain/paragan"], row["per_second"]
        numbers = row["batch"], rates["plain"], rates["paragan"], ratio["median"], *ratio["ci95"]
        yield f"| `{name}` | {{:.0f}} | {{:.0f}} | {{:.0f}} | {{:.2f}} [{{:.2f}}, {{:.2f}}] |", *numbers


@PAGE.states("record_loader")
def loader(result: Any) -> Iterator[Statement]:
    rates, ratio, training = result["records_per_s"], result["paragan/dataloader"], result["training"]
    yield "{:.0f} records/s", rates["paragan"]
    yield "{:.0f} with DataLoader", rates["dataloader"]
    yield "{:.1f} [{:.1f}, {:.1f}] times", ratio["median"], *ratio["ci95"]
    yield "waits {:.1f} % of its time", 100 * training["waiting"]
