"""Backends: what differs between CPUs, CUDA GPUs and Apple GPUs (MPS, untested).

One class for each kind of device. The rest of the package asks a backend and never compares device types. XLA is not
supported (docs/tuning.md says why).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch

from paragan.core.errors import UsageError

ContextManager = contextlib.AbstractContextManager[Any]
PROC_STATUS = Path("/proc/self/status")
PROC_CPUINFO = Path("/proc/cpuinfo")
CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")  # memory limit of a container


class Backend:
    """CPU backend; base of the others.

    dist_backend    : process-group backend for tensors on this device
    has_streams     : work is queued on streams, asynchronous copies from pinned memory included
    batch_p2p       : all sends and receives of an exchange have to be issued in one call
    prefers_compile : compiling many small kernels into one pays off
    profiler_name   : the activity torch's profiler has to be asked for, if any
    """

    dist_backend = "gloo"
    has_streams = False
    batch_p2p = False
    prefers_compile = False
    profiler_name: str | None = None

    def is_available(self) -> bool:
        """Return whether torch can use such a device on this host."""
        return True

    def device_for_rank(self, local_rank: int) -> torch.device:
        """Return the device of a rank of this host; select it where the backend has a current device.

        Raises:
            UsageError: there is no device for this rank.
        """
        return torch.device("cpu")

    def device_name(self, device: torch.device) -> str:
        """Return the model name of the device."""
        lines = PROC_CPUINFO.read_text().splitlines() if PROC_CPUINFO.exists() else []
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.processor() or platform.machine())

    def supports_bf16(self) -> bool:
        """Return whether it multiplies bf16 in hardware (a CPU: AVX512-BF16 or AMX, if Linux reports them)."""
        return bool({"avx512_bf16", "amx_bf16"} & cpu_features())

    def memory_bytes(self, device: torch.device) -> int:
        """Return the size of its memory, or the limit of the container this process runs in."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = CGROUP_MEMORY_MAX.read_text().strip() if CGROUP_MEMORY_MAX.exists() else "max"
        return min(total, int(limit)) if limit.isdigit() else total

    def peak_bytes(self, device: torch.device) -> int:
        """Return the peak memory use of this process, since its start or since `reset_peak_memory`."""
        if PROC_STATUS.exists() and (match := re.search(r"VmHWM:\s*(\d+) kB", PROC_STATUS.read_text())):
            return 1024 * int(match[1])
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

    def reset_peak_memory(self, device: torch.device) -> bool:
        """Set the peak to the present memory use. Returns False if the system cannot."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def synchronize(self, device: torch.device) -> None:
        """Wait until all work queued on the device is done."""

    def record_time(self) -> Any:
        """Return a timestamp; on a stream, of the moment when the work queued so far is done."""
        return time.perf_counter()

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Return the seconds between two timestamps of `record_time`, after `synchronize`."""
        return end - start

    def fork_rng(self, device: torch.device, enabled: bool = True) -> ContextManager:
        """Return a context after which the states of torch's generators are as before it."""
        return torch.random.fork_rng(devices=[], enabled=enabled)

    def full_precision_convs(self) -> ContextManager:
        """Return a context in which float32 convolutions are computed in full precision."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def side_streams(self, device: torch.device, count: int) -> Generator[list[ContextManager]]:
        """Yield `count` contexts whose work may overlap: the current stream, then side streams.

        The side streams wait for earlier work of the current stream, which waits for all of them at the end.
        """
        yield [contextlib.nullcontext() for _ in range(count)]

    def record_event(self, device: torch.device) -> Callable[[], None]:
        """Return a function that makes the stream it is called on wait for all work queued on this one so far."""
        return lambda: None


class CudaBackend(Backend):
    """CUDA GPUs."""

    dist_backend = "cpu:gloo,cuda:nccl"
    has_streams = True
    batch_p2p = True
    prefers_compile = True
    profiler_name = "cuda"

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_for_rank(self, local_rank: int) -> torch.device:
        if not self.is_available():
            raise UsageError("--device.kind=cuda: torch finds no CUDA device on this host. Use --device.kind=cpu")
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise UsageError(
                f"--device.kind=cuda: this host has {count} CUDA devices. Start at most {count} ranks on it",
                same_on_all_ranks=False,
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device

    def device_name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def supports_bf16(self) -> bool:
        return True

    def memory_bytes(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).total_memory

    def peak_bytes(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)

    def reset_peak_memory(self, device: torch.device) -> bool:
        torch.cuda.reset_peak_memory_stats(device)
        return True

    def synchronize(self, device: torch.device) -> None:
        torch.cuda.synchronize(device)

    def record_time(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000

    def fork_rng(self, device: torch.device, enabled: bool = True) -> ContextManager:
        return torch.random.fork_rng(devices=[device.index or 0], enabled=enabled)

    @contextlib.contextmanager
    def full_precision_convs(self) -> Generator[None]:
        """Keep cuDNN from rounding a convolution's inputs to 10 bits (TF32), which it does by default."""
        cudnn = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
        before = cudnn.fp32_precision
        cudnn.fp32_precision = "ieee"
        try:
            yield
        finally:
            cudnn.fp32_precision = before

    @contextlib.contextmanager
    def side_streams(self, device: torch.device, count: int) -> Generator[list[ContextManager]]:
        main = torch.cuda.current_stream(device)
        others = [_side_stream(device, i) for i in range(1, count)]
        for stream in others:
            stream.wait_stream(main)
        yield [contextlib.nullcontext(), *map(torch.cuda.stream, others)]
        for stream in others:
            main.wait_stream(stream)

    def record_event(self, device: torch.device) -> Callable[[], None]:
        event = torch.cuda.Event()
        event.record()
        return lambda: torch.cuda.current_stream().wait_event(event)


class MpsBackend(Backend):
    """Apple GPUs. Untested: the authors had none."""

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def device_for_rank(self, local_rank: int) -> torch.device:
        if not self.is_available():
            raise UsageError("--device.kind=mps: torch finds no Apple GPU on this host. Use --device.kind=cpu")
        if local_rank:
            raise UsageError(
                "--device.kind=mps: there is one device, for one rank. Start one rank.", same_on_all_ranks=False
            )
        return torch.device("mps")

    def supports_bf16(self) -> bool:
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def memory_bytes(self, device: torch.device) -> int:
        return torch.mps.recommended_max_memory()

    def peak_bytes(self, device: torch.device) -> int:
        return torch.mps.driver_allocated_memory()  # the present use: MPS does not report the peak

    def reset_peak_memory(self, device: torch.device) -> bool:
        return False

    def synchronize(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def fork_rng(self, device: torch.device, enabled: bool = True) -> ContextManager:
        return torch.random.fork_rng(devices=[0], enabled=enabled, device_type="mps")


BACKENDS: dict[str, Backend] = {"cpu": Backend(), "cuda": CudaBackend(), "mps": MpsBackend()}


PR_SET_THP_DISABLE = 41  # of sys/prctl.h

# Of malloc.h. M_TRIM_THRESHOLD: never; M_TOP_PAD: grow by 64 MB; M_MMAP_THRESHOLD: 32 MB and more are mapped.
MALLOC_OPTIONS = {-1: -1, -2: 64 << 20, -3: 32 << 20}


def backend_of(device: torch.device) -> Backend:
    """Return the backend of a device."""
    return BACKENDS[device.type]


def resolve_device_kind(kind: str) -> str:
    """Return `cpu`, `cuda` or `mps`; `auto` is CUDA if available, else the CPU."""
    if kind != "auto":
        return kind
    return "cuda" if BACKENDS["cuda"].is_available() else "cpu"


def pick_device(kind: str, local_rank: int = 0) -> torch.device:
    """Return the device of a rank of this host.

    Raises:
        UsageError: there is no such device.
    """
    return BACKENDS[resolve_device_kind(kind)].device_for_rank(local_rank)


def device_of_group(dist_backend: str) -> torch.device:
    """Return the device of this process for a process group that somebody else has formed.

    Args:
        dist_backend: the backend of the group, such as "gloo" or "nccl".
    """
    if "nccl" in dist_backend:
        return torch.device("cuda", torch.cuda.current_device())  # whoever formed the group has set it
    return torch.device("cpu")


def find_cpp_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile uses for CPUs, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def autocast_factory(device: torch.device, precision: str) -> Callable[[], ContextManager]:
    """Return a function that makes the context losses are computed in.

    Args:
        device: where the losses are computed.
        precision: `float32`, or `bf16` for autocast. Parameters, gradients and averages stay float32 in both.
    """
    return contextlib.nullcontext if precision == "float32" else lambda: torch.autocast(device.type, torch.bfloat16)


def has_huge_pages() -> bool:
    """Return whether the system offers 2 MB pages on request and torch requests them (see paragan/__init__.py)."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    is_offered = setting.exists() and "[never]" not in setting.read_text()
    return is_offered and os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"


def set_huge_pages(enabled: bool) -> None:
    """Switch 2 MB pages on or off for this process (Linux only).

    The kernel clears a page when it is first touched. In 4 KB pages, clearing a large tensor takes several times as
    long as adding two such tensors.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, int(not enabled), 0, 0, 0)


def tune_malloc() -> None:
    """Make glibc's malloc keep freed memory in this process (Linux only).

    By default every training pass would return memory to the system and get it back as pages that have to be mapped and
    cleared one by one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        for parameter, value in MALLOC_OPTIONS.items():
            mallopt(parameter, value)


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the feature flags of the CPU as Linux names them, among other words of /proc/cpuinfo."""
    return frozenset(PROC_CPUINFO.read_text().split() if PROC_CPUINFO.exists() else ())


@functools.cache
def _side_stream(device: torch.device, index: int) -> torch.cuda.Stream:
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # gradients are accumulated on the main one
    return torch.cuda.Stream(device)
