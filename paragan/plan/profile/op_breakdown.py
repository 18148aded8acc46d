"""What a round's time is spent on, by kind of operation, as torch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile

from paragan.core import devices

OPTIMIZER = ("optimizer.step", "_fused_adam", "_fused_sgd")
# kind -> words in the names of its operations; the first that fits
KINDS = {
    "copies": ("copy_", "contiguous", "clone", "_to_copy", "to_mkldnn", "aten::cat", "aten::stack"),
    "convolution": ("conv",),
    "products": ("::mm", "addmm", "bmm", "matmul", "linear", "::dot", "::mv", "::addmv", "attention"),
    "normalisation": ("_norm", "var_mean", "::var", "::std"),
    "optimizer": OPTIMIZER,
    "elementwise": ("aten::",),  # what is left: activations, sums, means, fills, views
}
OTHER = "other"  # Python, the interpreter's and autograd's own work, random numbers, waiting for data


def time_by_kind(play: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of operations by kind while `play` is under way, measured by the profiler."""
    kind = devices.kind_of(device)
    profiled = profile(use_kineto=bool(kind.profiled), use_device=kind.profiled)
    with profiled:
        play()
        kind.synchronize(device)
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in profiled.function_events or ():
        own = event.self_device_time_total if kind.profiled else event.self_cpu_time_total
        operation = kind_of([*_upwards(event)])
        if operation != OTHER:
            seconds[operation] += 1e-6 * own
    return seconds


def kind_of(names: list[str]) -> str:
    """The kind of an operation: by its own name, or that of one it is part of, innermost first. All within an
    optimizer's step is the optimizer's."""
    names = [name.lower() for name in names]
    if any(word in name for name in names for word in OPTIMIZER):
        return "optimizer"
    for name in names:
        for kind, words in KINDS.items():
            if kind != "elementwise" and any(word in name for word in words):
                return kind
    return "elementwise" if names and "aten::" in names[0] else OTHER


def shares(seconds: dict[str, float], whole: float) -> dict[str, float]:
    """Shares of a round that takes `whole` without the profiler, which sum to 1."""
    rest = max(0.0, whole - sum(seconds.values()))
    total = rest + sum(seconds.values())
    found = {kind: own / total for kind, own in seconds.items()} | {OTHER: rest / total}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _upwards(event: Any) -> Iterator[str]:
    """The names of an event, and of those it is in."""
    while event is not None:
        yield event.name
        event = event.cpu_parent
