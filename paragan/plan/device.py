"""What a device is called, what memory it has, and how fast it multiplies at best: measured, not promised."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .profile import Device

SIDES = {"cpu": 1024, "cuda": 8192}  # of the matrices that are multiplied
LIMIT = Path("/sys/fs/cgroup/memory.max")  # what a container may take
TYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


class Watch:
    """Moments on a device. Those of CUDA are of its stream: when a call returns, its kernels are only queued."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until all that was queued is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def between(self, first: Any, last: Any) -> float:
        """Seconds; after `settle`."""
        return first.elapsed_time(last) / 1000 if self.cuda else last - first


def described(device: torch.device, precision: str) -> Device:
    """This device, as it computes a run of this precision; its peak is not measured, but 0."""
    return Device(
        kind=device.type,
        name=_name(device),
        threads=torch.get_num_threads() if device.type == "cpu" else 1,
        precision=precision,
        peak_flops=0.0,
        memory=_memory(device),
        torch=torch.__version__,
        paragan=version("paragan"),
    )


def peak_flops(device: torch.device, precision: str, seconds: float = 0.3) -> float:
    """Operations a second of a large matrix product: the best of those that are done in this time."""
    side, watch = SIDES.get(device.type, SIDES["cpu"]), Watch(device)
    a = torch.randn(side, side, device=device).to(TYPES[precision])
    best, end = _multiplied(a, watch), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, _multiplied(a, watch))
    return 2 * side**3 / best


def _multiplied(a: Tensor, watch: Watch) -> float:
    start = watch.now()
    a @ a  # pyright: ignore[reportUnusedExpression]
    end = watch.now()
    watch.settle()
    return watch.between(start, end)


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    here = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = LIMIT.read_text().strip() if LIMIT.exists() else "max"
    return min(here, int(limit)) if limit.isdigit() else here


class Resident:
    """The most memory that was in use since `reset`, above what was when it was made: of the process, with what
    libraries take for themselves, or of CUDA's allocator. None where the system does not tell."""

    def __init__(self, device: torch.device):
        self.device = device
        self.reset()
        self.before = self._most()

    def reset(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self.tells = True
        except OSError:
            self.tells = False

    def rise(self) -> int | None:
        most = self._most()
        return None if most is None or self.before is None else max(0, most - self.before)

    def _most(self) -> int | None:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not self.tells:
            return None
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), None)
