"""This device in a profile, how fast it multiplies at best, and what a worker took of it: measured, not promised."""

from __future__ import annotations

import time
from importlib.metadata import version

import torch
from torch import Tensor

from paragan.core.devices import backend_of
from paragan.plan.profile.profile import DeviceInfo

MATRIX_SIDES = {"cpu": (1024, 2048)}  # of the matrices that are multiplied: enough to fill it; of other devices:
LARGE_MATRIX_SIDES = (4096, 8192)
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def describe_device(device: torch.device, precision: str) -> DeviceInfo:
    """This device, as it computes a run of this precision; its peak is not measured, but 0."""
    kind = backend_of(device)
    return DeviceInfo(
        kind=device.type,
        name=kind.device_name(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        precision=precision,
        peak_flops=0.0,
        memory_bytes=kind.memory_bytes(device),
        torch_version=torch.__version__,
        paragan_version=version("paragan"),
    )


def measure_peak_flops(device: torch.device, precision: str, seconds: float = 0.3) -> float:
    """Operations a second, multiplications and additions counted separately: the best of all products of square
    matrices, of every size for so many seconds."""
    return max(
        _measure_matmul_flops(side, DTYPES[precision], device, seconds)
        for side in MATRIX_SIDES.get(device.type, LARGE_MATRIX_SIDES)
    )


def _measure_matmul_flops(side: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Of products of [side, side] matrices, the fastest but for the first, which lays things out."""
    a = torch.randn(side, side, device=device).to(dtype)
    _time_matmul(a)
    best, end = _time_matmul(a), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _time_matmul(a))
    return 2 * side**3 / best


def _time_matmul(a: Tensor) -> float:
    kind = backend_of(a.device)
    start = kind.record_time()
    a @ a  # pyright: ignore[reportUnusedExpression]
    end = kind.record_time()
    kind.synchronize(a.device)
    return kind.elapsed_s(start, end)


class PeakMemory:
    """The most memory that was in use since `reset`, above what was when it was made: of the process, with what
    libraries take for themselves, or of the device's allocator. None where the system does not tell."""

    def __init__(self, device: torch.device):
        self.device, self.backend = device, backend_of(device)
        self.reset()
        self.baseline_bytes = self.backend.peak_bytes(device)

    def reset(self) -> None:
        self.is_supported = self.backend.reset_peak_memory(self.device)

    def increase_bytes(self) -> int | None:
        return max(0, self.backend.peak_bytes(self.device) - self.baseline_bytes) if self.is_supported else None
