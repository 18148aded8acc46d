"""Measure what exchanges compute: seconds per number, by operation.

    measure_codec_cost(["int8", "sign"])     # {"pass": 3e-10, "int8/encode": 8e-10, "int8/decode": 3e-10, ...}

"pass" is an element-wise operation over memory. A simulated rank is charged with these costs for the numbers that its
exchanges compute (plan/predict/skip_compute.py).
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import TypeAdapter

from paragan.comm.compression.compressors import Compressor, Wire
from paragan.core.devices import backend_of

BUCKET_NUMEL = 1 << 19  # 2 MB
REPEATS = 7
DEFAULT_CODEC_COST = {"pass": 4e-10, "encode": 1.5e-9, "decode": 7e-10}  # of compressors that were not measured
DEFAULT_WIRES = ("bf16", "fp16", "int8", "int4", "int2", "qsgd", "sign", "topk", "randomk")


def measure_codec_cost(
    wires: Iterable[str | Compressor] = DEFAULT_WIRES, device: torch.device | str = "cpu", repeats: int = REPEATS
) -> dict[str, float]:
    """Measure the seconds per number of each operation on `device`. It takes about a tenth of a second."""
    x, out = (torch.randn(BUCKET_NUMEL, device=device) for _ in range(2))
    seconds = {"pass": _seconds_per_number(lambda: out.add_(x), device, repeats)}
    for entry in wires:
        wire: Any = TypeAdapter(Wire).validate_python(entry) if isinstance(entry, str) else entry
        data = torch.zeros(wire.nbytes(BUCKET_NUMEL), dtype=torch.uint8, device=device)
        encode = functools.partial(wire.encode, x, data, 0)
        decode = functools.partial(wire.decode, data, out)
        seconds[f"{wire.name}/encode"] = _seconds_per_number(encode, device, repeats)
        seconds[f"{wire.name}/decode"] = _seconds_per_number(decode, device, repeats)
    return seconds


def _seconds_per_number(action: Callable[[], object], device: torch.device | str, repeats: int) -> float:
    """Return the median seconds per number."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        action()
        backend_of(torch.device(device)).synchronize(torch.device(device))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / BUCKET_NUMEL
