"""What a round's time is spent on, by kind of operation, as torch's profiler sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile

from paragan.core import devices

OPTIMIZER_OP_NAMES = ("optimizer.step", "_fused_adam", "_fused_sgd")
# kind -> words in the names of its operations; the first that fits
OP_KINDS = {
    "copies": ("copy_", "contiguous", "clone", "_to_copy", "to_mkldnn", "aten::cat", "aten::stack"),
    "convolution": ("conv",),
    "products": ("::mm", "addmm", "bmm", "matmul", "linear", "::dot", "::mv", "::addmv", "attention"),
    "normalisation": ("_norm", "var_mean", "::var", "::std"),
    "optimizer": OPTIMIZER_OP_NAMES,
    "elementwise": ("aten::",),  # what is left: activations, sums, means, fills, views
}
OTHER_KIND = "other"  # Python, the interpreter's and autograd's own work, random numbers, waiting for data


def time_by_op_kind(fn: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds of operations by kind while `play` is under way, measured by the profiler."""
    kind = devices.backend_of(device)
    profiled = profile(use_kineto=bool(kind.profiler_name), use_device=kind.profiler_name)
    with profiled:
        fn()
        kind.synchronize(device)
    seconds = dict.fromkeys(OP_KINDS, 0.0)
    for event in profiled.function_events or ():
        own = event.self_device_time_total if kind.profiler_name else event.self_cpu_time_total
        operation = op_kind([*_enclosing_names(event)])
        if operation != OTHER_KIND:
            seconds[operation] += 1e-6 * own
    return seconds


def op_kind(names: list[str]) -> str:
    """The kind of an operation: by its own name, or that of one it is part of, innermost first. All within an
    optimizer's step is the optimizer's."""
    names = [name.lower() for name in names]
    if any(word in name for name in names for word in OPTIMIZER_OP_NAMES):
        return "optimizer"
    for name in names:
        for kind, words in OP_KINDS.items():
            if kind != "elementwise" and any(word in name for word in words):
                return kind
    return "elementwise" if names and "aten::" in names[0] else OTHER_KIND


def op_shares(seconds_by_kind: dict[str, float], round_s: float) -> dict[str, float]:
    """Shares of a round that takes `whole` without the profiler, which sum to 1."""
    rest = max(0.0, round_s - sum(seconds_by_kind.values()))
    total = rest + sum(seconds_by_kind.values())
    found = {kind: own / total for kind, own in seconds_by_kind.items()} | {OTHER_KIND: rest / total}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _enclosing_names(event: Any) -> Iterator[str]:
    """The names of an event, and of those it is in."""
    while event is not None:
        yield event.name
        event = event.cpu_parent
