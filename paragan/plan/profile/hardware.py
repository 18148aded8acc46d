"""This device in a profile, how fast it multiplies at best, and what a worker took of it: measured, not promised."""

from __future__ import annotations

import time
from importlib.metadata import version

import torch
from torch import Tensor

from paragan.core.devices import kind_of
from paragan.plan.profile.profile import Device

SIDES = {"cpu": (1024, 2048)}  # of the matrices that are multiplied: enough to fill it; of other devices:
LARGE = (4096, 8192)
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def described(device: torch.device, precision: str) -> Device:
    """This device, as it computes a run of this precision; its peak is not measured, but 0."""
    kind = kind_of(device)
    return Device(
        kind=device.type,
        name=kind.name(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        precision=precision,
        peak_flops=0.0,
        memory=kind.memory(device),
        torch=torch.__version__,
        paragan=version("paragan"),
    )


def peak_flops(device: torch.device, precision: str, seconds: float = 0.3) -> float:
    """Operations a second, multiplications and additions counted separately: the best of all products of square
    matrices, of every size for so many seconds."""
    return max(_rate(side, TYPES[precision], device, seconds) for side in SIDES.get(device.type, LARGE))


def _rate(side: int, dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """Of products of [side, side] matrices, the fastest but for the first, which lays things out."""
    a = torch.randn(side, side, device=device).to(dtype)
    _multiplied(a)
    best, end = _multiplied(a), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _multiplied(a))
    return 2 * side**3 / best


def _multiplied(a: Tensor) -> float:
    kind = kind_of(a.device)
    start = kind.now()
    a @ a  # pyright: ignore[reportUnusedExpression]
    end = kind.now()
    kind.synchronize(a.device)
    return kind.seconds(start, end)


class Resident:
    """The most memory that was in use since `reset`, above what was when it was made: of the process, with what
    libraries take for themselves, or of the device's allocator. None where the system does not tell."""

    def __init__(self, device: torch.device):
        self.device, self.kind = device, kind_of(device)
        self.reset()
        self.before = self.kind.peak_bytes(device)

    def reset(self) -> None:
        self.tells = self.kind.forget_peak(self.device)

    def rise(self) -> int | None:
        return max(0, self.kind.peak_bytes(self.device) - self.before) if self.tells else None
