"""Measure single operations on one core, and the gain from avoiding them: `python -m benchmarks.speed.operations`.

    python -m benchmarks.speed.operations [--json F]    about a minute, on a machine that does nothing else

pages       filling 64 MB of new memory, in pages of 4 KB and of 2 MB
formats     the gradient of a leaky ReLU of 128 x 32 x 8 x 8, whose maps have two memory formats, or one
resampling  R3GAN's change of resolution towards the larger map, in bf16 and in float32
R1          D of R3GAN with R1, 4 images: grouped convolutions of torch, and ours (nets/grouped_conv.py)
touched     new pages in a round of the plain Fashion-MNIST loop: freed memory is given back, or kept. A count
"""

from __future__ import annotations

import argparse
import copy
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lib import plain_pytorch as plain
from benchmarks.lib.session_fixture import make_endless_run, random_dataset
from benchmarks.lib.timing import (
    Times,
    count_steps,
    describe_machine,
    format_machine,
    format_table,
    interleave,
    repeat_fn,
    save_json,
)
from paragan.config.resolve import make_spec
from paragan.core.devices import set_huge_pages, tune_malloc
from paragan.train.build import build_networks

BLOCK_S = 0.2
LARGE_BYTES = 64 << 20
R1_IMAGES = 4
PRECISIONS = ("float32", "bf16")
aten = torch.ops.aten


def time_in_turns(operations: Mapping[str, Callable[[], object]], rounds: int = 9) -> Times:
    contestants = {name: repeat_fn(operation) for name, operation in operations.items()}
    slowest = min(count_steps(BLOCK_S, run_steps) for run_steps in contestants.values())
    return interleave(contestants, rounds=rounds, steps=slowest)


def time_pages() -> Times:
    def fill(huge: bool) -> None:
        set_huge_pages(huge)
        torch.empty(LARGE_BYTES, dtype=torch.uint8).fill_(1)

    times = time_in_turns({"2 MB": lambda: fill(True), "4 KB": lambda: fill(False)})
    set_huge_pages(True)
    return times


def time_formats() -> Times:
    x = torch.randn(128, 32, 8, 8).contiguous(memory_format=torch.channels_last)
    same, other = torch.randn_like(x), torch.randn(128, 32, 8, 8)

    def gradient(of_output: Tensor) -> Tensor:
        return aten.leaky_relu_backward(of_output, x, 0.2, False)

    return time_in_turns({"one": lambda: gradient(same), "mixed": lambda: gradient(other)})


def time_resampling() -> Times:
    maps = torch.randn(64, 192, 16, 16).contiguous(memory_format=torch.channels_last)
    kernel = torch.randn(192, 1, 3, 3)

    def upsample(dtype: torch.dtype) -> Callable[[], Tensor]:
        x, weight = maps.to(dtype), kernel.to(dtype)
        return lambda: F.conv_transpose2d(x, weight, None, 2, 1, 1, groups=192)

    return time_in_turns({"float32": upsample(torch.float32), "bf16": upsample(torch.bfloat16)})


def time_r1(rounds: int) -> Times:
    images = random_dataset(32, 3)
    run = make_endless_run("r3gan-cifar10", images, "nets.width=192", "lanes=1")
    ours = build_networks(run, make_spec(run.data, images), torch.device("cpu")).d
    of_torch = plain.to_plain_layers(copy.deepcopy(ours))
    x, y = torch.randn(R1_IMAGES, 3, 32, 32, requires_grad=True), torch.arange(R1_IMAGES) % 10

    def step(d: nn.Module, bf16: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = plain.logits_of(d(x, y))
            loss = F.softplus(-logits).mean() + plain.grad_norm_squared(logits, x)
        loss.backward()

    def of(d: nn.Module, bf16: bool) -> Callable[[], None]:
        return lambda: step(d, bf16)

    steps = {
        f"{name}, {precision}": of(d, precision == "bf16")
        for precision in PRECISIONS
        for name, d in (("ours", ours), ("torch", of_torch))
    }
    return interleave({name: repeat_fn(action) for name, action in steps.items()}, rounds=rounds, steps=1)


def count_touched_pages(rounds: int = 3) -> dict[str, float]:
    """Return the pages that were mapped in a round. The second loop keeps memory, as this process does from then on."""
    images = random_dataset(32, 1)
    loop = plain.PlainTrainer(make_endless_run("fashion", images, "batch=32"), images)

    def touched() -> float:
        loop.step()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(rounds):
            loop.step()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / rounds

    set_huge_pages(False)
    by_default = touched()
    tune_malloc()
    kept = touched()
    set_huge_pages(True)
    return {"given back": by_default, "kept": kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="that D with R1 is timed (7)")
    parser.add_argument("--json", metavar="F", help="also write everything to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = describe_machine()
    print(format_machine(machine))
    times = {
        "pages": (time_pages(), "2 MB"),
        "formats": (time_formats(), "one"),
        "resampling": (time_resampling(), "float32"),
        "R1": (time_r1(options.rounds), "ours, float32"),
    }
    touched = count_touched_pages()
    rows = [
        [f"{case}, {name}", measured.spread(name), measured.ratio(name, to)]
        for case, (measured, to) in times.items()
        for name in measured.ms
    ]
    print(format_table(["", "ms", "ratio to the first"], rows))
    print(f"pages touched in a round of the plain Fashion-MNIST loop: {touched}")
    faster = {precision: times["R1"][0].ratio(f"torch, {precision}", f"ours, {precision}") for precision in PRECISIONS}
    result: dict[str, Any] = {
        "machine": machine,
        **{case: measured.to_json(to) for case, (measured, to) in times.items()},
        "R1, ours is faster": {precision: ratio.to_json() for precision, ratio in faster.items()},
        "touched": touched,
    }
    save_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
