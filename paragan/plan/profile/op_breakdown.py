"""Where the time of a round goes, by kind of operation, measured with torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile

from paragan.core import devices

OPTIMIZER_OP_NAMES = ("optimizer.step", "_fused_adam", "_fused_sgd")
# kind -> words in the names of its operations; the first match counts
OP_KINDS = {
    "copies": ("copy_", "contiguous", "clone", "_to_copy", "to_mkldnn", "aten::cat", "aten::stack"),
    "convolution": ("conv",),
    "products": ("::mm", "addmm", "bmm", "matmul", "linear", "::dot", "::mv", "::addmv", "attention"),
    "normalisation": ("_norm", "var_mean", "::var", "::std"),
    "optimizer": OPTIMIZER_OP_NAMES,
    "elementwise": ("aten::",),  # the rest: activations, sums, means, fills, views
}
OTHER_KIND = "other"  # Python, autograd itself, random numbers, waiting for data


def time_by_op_kind(fn: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Run `fn` under the profiler. Returns the seconds of its operations by kind, without OTHER_KIND."""
    backend = devices.backend_of(device)
    profiled = profile(use_kineto=bool(backend.profiler_name), use_device=backend.profiler_name)
    with profiled:
        fn()
        backend.synchronize(device)
    seconds = dict.fromkeys(OP_KINDS, 0.0)
    for event in profiled.function_events or ():
        self_us = event.self_device_time_total if backend.profiler_name else event.self_cpu_time_total
        kind = op_kind([*_enclosing_names(event)])
        if kind != OTHER_KIND:
            seconds[kind] += 1e-6 * self_us
    return seconds


def op_kind(names: list[str]) -> str:
    """Return the kind of an operation by its name and those of the operations around it, innermost first.

    Everything inside an optimizer step is of kind "optimizer".
    """
    names = [name.lower() for name in names]
    if any(word in name for name in names for word in OPTIMIZER_OP_NAMES):
        return "optimizer"
    for name in names:
        for kind, words in OP_KINDS.items():
            if kind != "elementwise" and any(word in name for word in words):
                return kind
    return "elementwise" if names and "aten::" in names[0] else OTHER_KIND


def op_shares(seconds_by_kind: dict[str, float], round_s: float) -> dict[str, float]:
    """Return fractions of a round that takes `round_s` without the profiler. They sum to 1, the largest first."""
    rest = max(0.0, round_s - sum(seconds_by_kind.values()))
    total = rest + sum(seconds_by_kind.values())
    shares = {kind: seconds / total for kind, seconds in seconds_by_kind.items()} | {OTHER_KIND: rest / total}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _enclosing_names(event: Any) -> Iterator[str]:
    """Yield the names of an event and of the events around it."""
    while event is not None:
        yield event.name
        event = event.cpu_parent
