"""What differs between kinds of devices: a CPU, CUDA, Apple's GPU (mps, never tried by those who wrote this)."""

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
CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")  # what a container may take


class Backend:
    """A CPU; and what holds for any device, where its own kind does not say otherwise.

    backend : what carries messages between ranks whose numbers lie there
    streams : work is put into streams, copies from pinned memory among them
    at_once : all messages of a swap have to be handed over in one call
    fuses   : many small kernels are worth compiling into one
    profiled: what torch's profiler calls it, where it has to be told
    """

    dist_backend, has_streams, batch_p2p, prefers_compile = "gloo", False, False, False
    profiler_name: str | None = None

    def is_available(self) -> bool:
        return True

    def device_for_rank(self, local_rank: int) -> torch.device:
        """The device of a rank. Unusable where there is none for it."""
        return torch.device("cpu")

    def device_name(self, device: torch.device) -> str:
        about = Path("/proc/cpuinfo")
        lines = about.read_text().splitlines() if about.exists() else []
        named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(named, platform.processor() or platform.machine())

    def supports_bf16(self) -> bool:
        """Whether it multiplies bf16 in hardware (a CPU: AVX512-BF16 or AMX, as far as Linux tells)."""
        return bool({"avx512_bf16", "amx_bf16"} & cpu_features())

    def memory_bytes(self, device: torch.device) -> int:
        """Bytes there are, or that a container may take."""
        here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = CGROUP_MEMORY_MAX.read_text().strip() if CGROUP_MEMORY_MAX.exists() else "max"
        return min(here, int(limit)) if limit.isdigit() else here

    def peak_bytes(self, device: torch.device) -> int:
        """The most that was taken by this process so far, or since `forget_peak`."""
        if PROC_STATUS.exists() and (most := re.search(r"VmHWM:\s*(\d+) kB", PROC_STATUS.read_text())):
            return 1024 * int(most[1])
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

    def reset_peak_memory(self, device: torch.device) -> bool:
        """Begin `peak_bytes` anew with what is taken now. False where the system cannot."""
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return False
        return True

    def synchronize(self, device: torch.device) -> None:
        """Wait until all that was asked of it is done."""

    def record_time(self) -> Any:
        """A moment of the device's own: of streams, when what was asked for so far is done."""
        return time.perf_counter()

    def elapsed_s(self, start: Any, end: Any) -> float:
        """Between two moments, once all is done."""
        return end - start

    def fork_rng(self, device: torch.device, enabled: bool = True) -> ContextManager:
        """Inside, torch's random numbers may be drawn and seeded; after it they are as before."""
        return torch.random.fork_rng(devices=[], enabled=enabled)

    def full_precision_convs(self) -> ContextManager:
        """Inside, a convolution of float32 rounds as float32 does."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def side_streams(self, device: torch.device, count: int) -> Generator[list[ContextManager]]:
        """`count` places to compute in: the first where everything is, the others beside it, where there are streams.
        What came before is waited for by all, and all by what comes after."""
        yield [contextlib.nullcontext() for _ in range(count)]

    def record_event(self, device: torch.device) -> Callable[[], None]:
        """What waits, on whatever stream it is called, for all that was asked for on this one so far."""
        return lambda: None


class CudaBackend(Backend):
    dist_backend, has_streams, batch_p2p, prefers_compile, profiler_name = (
        "cpu:gloo,cuda:nccl",
        True,
        True,
        True,
        "cuda",
    )

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def device_for_rank(self, local_rank: int) -> torch.device:
        if not self.is_available():
            raise UsageError("--device.kind=cuda: torch sees no CUDA device here; use --device.kind=cpu")
        here = torch.cuda.device_count()
        if local_rank >= here:
            raise UsageError(
                f"this host has {here} CUDA devices: start at most as many ranks on it", same_on_all_ranks=False
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
        main, others = torch.cuda.current_stream(device), [_side_stream(device, i) for i in range(1, count)]
        for stream in others:
            stream.wait_stream(main)
        yield [contextlib.nullcontext(), *map(torch.cuda.stream, others)]
        for stream in others:
            main.wait_stream(stream)

    def record_event(self, device: torch.device) -> Callable[[], None]:
        made = torch.cuda.Event()
        made.record()
        return lambda: torch.cuda.current_stream().wait_event(made)


class MpsBackend(Backend):
    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def device_for_rank(self, local_rank: int) -> torch.device:
        if not self.is_available():
            raise UsageError("--device.kind=mps: torch sees no GPU of Apple's here; use --device.kind=cpu")
        if local_rank:
            raise UsageError(
                "--device.kind=mps is one device, which one rank can have: start one", same_on_all_ranks=False
            )
        return torch.device("mps")

    def supports_bf16(self) -> bool:
        return torch.backends.mps.is_macos_or_newer(14, 0)

    def memory_bytes(self, device: torch.device) -> int:
        return torch.mps.recommended_max_memory()

    def peak_bytes(self, device: torch.device) -> int:
        return torch.mps.driver_allocated_memory()  # now: the most there was is not told

    def reset_peak_memory(self, device: torch.device) -> bool:
        return False

    def synchronize(self, device: torch.device) -> None:
        torch.mps.synchronize()

    def fork_rng(self, device: torch.device, enabled: bool = True) -> ContextManager:
        return torch.random.fork_rng(devices=[0], enabled=enabled, device_type="mps")


BACKENDS: dict[str, Backend] = {"cpu": Backend(), "cuda": CudaBackend(), "mps": MpsBackend()}


def backend_of(device: torch.device) -> Backend:
    return BACKENDS[device.type]


def resolve_device_kind(kind: str) -> str:
    """auto: CUDA where there is one, else the CPU."""
    return kind if kind != "auto" else "cuda" if BACKENDS["cuda"].is_available() else "cpu"


def pick_device(kind: str, local_rank: int = 0) -> torch.device:
    """The device of a rank."""
    return BACKENDS[resolve_device_kind(kind)].device_for_rank(local_rank)


def find_cpp_compiler() -> str | None:
    """What torch compiles programs for CPUs with, where it is there."""
    return shutil.which(os.environ.get("CXX", "g++"))


def autocast_factory(device: torch.device, precision: str) -> Callable[[], ContextManager]:
    """The context losses are computed in. Parameters, gradients and averages stay float32."""
    return contextlib.nullcontext if precision == "float32" else lambda: torch.autocast(device.type, torch.bfloat16)


def has_huge_pages() -> bool:
    """Whether this system gives pages of 2 MB to those who ask, and torch asks (paragan/__init__.py lets it)."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    given = setting.exists() and "[never]" not in setting.read_text()
    return given and os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"


def set_huge_pages(enabled: bool) -> None:
    """Whether this process is given them. A large tensor is memory of the kernel, cleared as it is first touched, page
    by page: in pages of 4 KB that takes several times what an addition of two such tensors takes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, int(not enabled), 0, 0, 0)


PR_SET_THP_DISABLE = 41  # of sys/prctl.h


def tune_malloc() -> None:
    """Let this process keep what it frees, where glibc gives it out: else the end of its memory goes back to the system
    with every pass, and comes again in pages that are cleared and mapped one by one."""
    allocate = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if allocate:
        for parameter, value in MALLOC_OPTIONS.items():
            allocate(parameter, value)


# of malloc.h. M_TRIM_THRESHOLD: never; M_TOP_PAD: grow by 64 MB; M_MMAP_THRESHOLD: larger blocks come from the system
MALLOC_OPTIONS = {-1: -1, -2: 64 << 20, -3: 32 << 20}


@functools.cache
def cpu_features() -> frozenset[str]:
    """What this processor can do, in Linux's words."""
    about = Path("/proc/cpuinfo")
    return frozenset(about.read_text().split() if about.exists() else ())


@functools.cache
def _side_stream(device: torch.device, index: int) -> torch.cuda.Stream:
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # gradients are added up on the main one
    return torch.cuda.Stream(device)
