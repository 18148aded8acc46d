"""What a device can do at most, measured: a matrix product in the precision of the run."""

from __future__ import annotations

import time

import torch

from ..devices import kind_of

SIZES = {"cpu": (1024, 2048)}  # enough to fill it; of other devices:
LARGE = (4096, 8192)


def peak_flops(device: torch.device, precision: str, seconds: float = 0.5) -> float:
    """Operations a second, multiplications and additions counted separately: the best of all products of square
    matrices, of every size for so many seconds."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return max(_rate(n, dtype, device, seconds) for n in SIZES.get(device.type, LARGE))


def _rate(n: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Of products of [n, n] matrices, the fastest but for the first, which lays things out."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    best, end = float("inf"), time.perf_counter() + seconds
    _timed(a, b)
    while best == float("inf") or time.perf_counter() < end:
        best = min(best, _timed(a, b))
    return 2 * n**3 / best


def _timed(a: torch.Tensor, b: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(a, b)
    kind_of(a.device).synchronize(a.device)
    return time.perf_counter() - start
