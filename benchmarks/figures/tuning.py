"""State the figures of docs/measurements/tuning.md."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from benchmarks.figures.registry import Page, Statement, median_ratio, speeds

PAGE = Page(
    "docs/measurements/tuning.md",
    not_measured={
        "the 4x4 convolutions with stride 2": "settings",
        "(64, five steps of D)": "settings",
        "the 3x3 ones": "a setting",
    },
)


@PAGE.states("layout")
def decisions(result: Any) -> Iterator[Statement]:
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


@PAGE.states("networks_step_bf16")
def at_the_published_batch(result: Any) -> Iterator[Statement]:
    names = "sngan", "biggan", "sagan", "contragan"
    faster = [result["step"][name]["times faster"]["ours, bf16"]["median"] for name in names]
    yield "the defaults were {:.2f} (SNGAN), {:.2f} (BigGAN), {:.2f} (SAGAN) and {:.2f} (ContraGAN) times", *faster


@PAGE.states("convolutions")
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
