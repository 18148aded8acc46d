"""Define one backend for each kind of device: CPUs, CUDA and ROCm GPUs, Intel GPUs (XPU) and Apple GPUs (MPS).

The rest of the package asks a backend for what differs between devices (`core/devices.py` has all of them). XPU and MPS
are untested. XLA is not supported (docs/accelerators.md says why).
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import resource
import sys
import time
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paragan.core.errors import UsageError

ContextManager = contextlib.AbstractContextManager[Any]
PROC_STATUS = Path("/proc/self/status")
PROC_CPUINFO = Path("/proc/cpuinfo")
CGROUP_MEMORY_MAX = Path("/sys/fs/cgroup/memory.max")  # memory limit of a container


class DeviceEvent(Protocol):
    """A moment in the work of a device."""

    def wait(self) -> None:
        """Let the current stream wait for it."""
        ...

    def synchronize(self) -> None:
        """Block the host until it has passed."""
        ...


class PastEvent:
    """The moment of an event on a device without streams: it has passed."""

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Backend:
    """CPU backend; base of the others.

    dist_backend    : process-group backend for tensors on this device
    has_streams     : work is queued on streams, asynchronous copies from pinned memory included
    batch_p2p       : all sends and receives of an exchange have to be issued in one call
    prefers_compile : compiling many small kernels into one pays off
    profiler_name   : the activity torch's profiler has to be asked for, if any
    visible_with    : environment variables that say which devices of the host this process may use
    """

    dist_backend = "gloo"
    has_streams = False
    batch_p2p = False
    prefers_compile = False
    profiler_name: str | None = None
    visible_with: Sequence[str] = ()

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

    def device_id(self, device: torch.device) -> str:
        """Return what no other device of this host is called; "" if ranks may share the device."""
        return ""

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

    def empty_cache(self, device: torch.device) -> None:
        """Give back memory that torch keeps for later tensors."""

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

    def record_event(self, device: torch.device) -> DeviceEvent:
        """Return the moment when all work is done that is queued on the current stream so far."""
        return PastEvent()

    def page_lock(self, array: np.ndarray) -> None:
        """Page-lock memory of the host for as long as it lives, so that it is copied to the device asynchronously."""

    def pinned_copy(self, x: Tensor) -> Tensor:
        """Return a tensor of the host, in memory from which it is copied to the device asynchronously."""
        return x


class StreamBackend(Backend):
    """Accelerators that queue work on streams, and whose module of torch has the interface of `torch.cuda`.

    kind : as in `--device.kind`
    """

    kind: str
    has_streams = True
    batch_p2p = True
    prefers_compile = True

    @property
    def module(self) -> Any:
        """Return the module of torch."""
        return torch.get_device_module(self.kind)

    def is_available(self) -> bool:
        return self.module.is_available()

    def device_for_rank(self, local_rank: int) -> torch.device:
        if not self.is_available():
            raise UsageError(f"--device.kind={self.kind}: {self._unavailable_reason()}. Use --device.kind=cpu")
        count = self.module.device_count()
        if count == 1 and self._is_one_of_this_rank():
            local_rank = 0
        if local_rank >= count:
            raise UsageError(
                f"--device.kind={self.kind}: of {self.kind.upper()} devices this process sees {count}. Start at most "
                f"{count} of the ranks on this host",
                same_on_all_ranks=False,
            )
        return self.device_at(local_rank)

    def device_at(self, index: int) -> torch.device:
        """Return a device that this process sees by its number, and select it.

        Raises:
            UsageError: there is no such device.
        """
        if not self.is_available():
            raise UsageError(f"--device {self.kind}:{index}: {self._unavailable_reason()}. Use --device cpu")
        count = self.module.device_count()
        if index >= count:
            raise UsageError(f"--device {self.kind}:{index}: torch finds {count}. Use --device {self.kind}:{count - 1}")
        device = torch.device(self.kind, index)
        self.check_build(device)
        self.module.set_device(device)
        return device

    def check_build(self, device: torch.device) -> None:
        """Raise UsageError if this build of torch has no code for the device."""

    def _unavailable_reason(self) -> str:
        return f"torch finds no {self.kind.upper()} device on this host"

    def _is_one_of_this_rank(self) -> bool:
        """Return whether whoever started this process has given it one device, as Slurm and Ray do."""
        visible = [os.environ.get(name, "") for name in self.visible_with]
        return any(devices and "," not in devices for devices in visible)

    def device_name(self, device: torch.device) -> str:
        return self.module.get_device_name(device)

    def device_id(self, device: torch.device) -> str:
        return str(getattr(self.module.get_device_properties(device), "uuid", ""))

    def supports_bf16(self) -> bool:
        return True

    def memory_bytes(self, device: torch.device) -> int:
        return self.module.get_device_properties(device).total_memory

    def peak_bytes(self, device: torch.device) -> int:
        return self.module.max_memory_allocated(device)

    def reset_peak_memory(self, device: torch.device) -> bool:
        self.module.reset_peak_memory_stats(device)
        return True

    def empty_cache(self, device: torch.device) -> None:
        self.module.empty_cache()

    def synchronize(self, device: torch.device) -> None:
        self.module.synchronize(device)

    def record_time(self) -> Any:
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_s(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) / 1000

    def fork_rng(self, device: torch.device, enabled: bool = True) -> ContextManager:
        return torch.random.fork_rng(devices=[device.index or 0], enabled=enabled, device_type=device.type)

    @contextlib.contextmanager
    def side_streams(self, device: torch.device, count: int) -> Generator[list[ContextManager]]:
        main = self.module.current_stream(device)
        others = [_side_stream(self, device, i) for i in range(1, count)]
        for stream in others:
            stream.wait_stream(main)
        yield [contextlib.nullcontext(), *map(self.module.stream, others)]
        for stream in others:
            main.wait_stream(stream)

    def record_event(self, device: torch.device) -> DeviceEvent:
        event = self.module.Event()
        event.record()
        return event

    def pinned_copy(self, x: Tensor) -> Tensor:
        return x.pin_memory()


class CudaBackend(StreamBackend):
    """CUDA GPUs, and those of AMD: a build of torch for ROCm calls them `cuda`, too."""

    kind = "cuda"
    visible_with = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    dist_backend = "cpu:gloo,cuda:nccl"
    profiler_name = "cuda"

    def supports_bf16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def _unavailable_reason(self) -> str:
        if not torch.version.cuda and not torch.version.hip:
            return f"this build of torch ({torch.__version__}) has no CUDA"
        return super()._unavailable_reason()

    def check_build(self, device: torch.device) -> None:
        built_for = torch.cuda.get_arch_list()
        name = _architecture(device)
        if built_for and not any(_runs_on(code, name) for code in built_for):
            raise UsageError(
                f"--device.kind=cuda: this build of torch has code for {', '.join(built_for)}, and not for "
                f"{torch.cuda.get_device_name(device)}, which is {name}. Use --device.kind=cpu, or install another "
                "build of torch"
            )

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

    def page_lock(self, array: np.ndarray) -> None:
        runtime: Any = torch.cuda.cudart()
        address = array.ctypes.data
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, array.nbytes, 0)))
        weakref.finalize(array, runtime.cudaHostUnregister, address).atexit = False


class XpuBackend(StreamBackend):
    """Intel GPUs. Untested: the authors had none."""

    kind = "xpu"
    visible_with = ("ZE_AFFINITY_MASK",)
    dist_backend = "cpu:gloo,xpu:xccl"
    profiler_name = "xpu"


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


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the feature flags of the CPU as Linux names them, among other words of /proc/cpuinfo."""
    return frozenset(PROC_CPUINFO.read_text().split() if PROC_CPUINFO.exists() else ())


@functools.cache
def _side_stream(backend: StreamBackend, device: torch.device, index: int) -> Any:
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)  # gradients are accumulated on the main one
    return backend.module.Stream(device)


def _architecture(device: torch.device) -> str:
    """Return the architecture of a card as `torch.cuda.get_arch_list` names it: sm_90, gfx942."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _runs_on(code: str, architecture: str) -> bool:
    """Return whether code of a build runs on a card: of the same generation and not newer, or PTX that is not newer."""
    kind, _, number = code.partition("_")
    if kind not in ("sm", "compute"):
        return code.partition(":")[0] == architecture
    built, card = (int(re.sub(r"\D", "", x)) for x in (number, architecture))
    return built <= card and (kind == "compute" or built // 10 == card // 10)
