"""Describe a device, and measure its peak speed and the peak memory of a process."""

from __future__ import annotations

import time
from importlib.metadata import version

import torch
from torch import Tensor

from paragan.core.devices import backend_of
from paragan.plan.profile.profile import DeviceInfo

MATRIX_SIDES = {"cpu": (1024, 2048)}  # of the multiplied matrices, large enough to use the whole device
LARGE_MATRIX_SIDES = (4096, 8192)  # for other devices
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def describe_device(device: torch.device, precision: str) -> DeviceInfo:
    """Describe a device for a run of this precision. `peak_flops` is 0: not measured."""
    backend = backend_of(device)
    return DeviceInfo(
        kind=device.type,
        name=backend.device_name(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        precision=precision,
        peak_flops=0.0,
        memory_bytes=backend.memory_bytes(device),
        torch_version=torch.__version__,
        paragan_version=version("paragan"),
    )


def measure_peak_flops(device: torch.device, precision: str, seconds: float = 0.3) -> float:
    """Measure operations per second: the fastest product of square matrices, each size for `seconds`.

    A multiplication and an addition count as two operations.
    """
    return max(
        _measure_matmul_flops(side, DTYPES[precision], device, seconds)
        for side in MATRIX_SIDES.get(device.type, LARGE_MATRIX_SIDES)
    )


def _measure_matmul_flops(side: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Return the operations per second of the fastest product of [side, side] matrices, except the first one."""
    a = torch.randn(side, side, device=device).to(dtype)
    _time_matmul(a)
    best_s = _time_matmul(a)
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        best_s = min(best_s, _time_matmul(a))
    return 2 * side**3 / best_s


def _time_matmul(a: Tensor) -> float:
    backend = backend_of(a.device)
    start = backend.record_time()
    a @ a  # pyright: ignore[reportUnusedExpression]
    end = backend.record_time()
    backend.synchronize(a.device)
    return backend.elapsed_s(start, end)


class PeakMemory:
    """The peak memory since `reset`, above the memory in use when the object was made.

    On a CPU it is that of the process, including libraries; else that of the device's allocator.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.backend = backend_of(device)
        self.reset()
        self.baseline_bytes = self.backend.peak_bytes(device)

    def reset(self) -> None:
        """Start a new measurement."""
        self.is_supported = self.backend.reset_peak_memory(self.device)

    def increase_bytes(self) -> int | None:
        """Return the peak above the baseline; None if the system cannot tell."""
        if not self.is_supported:
            return None
        return max(0, self.backend.peak_bytes(self.device) - self.baseline_bytes)
