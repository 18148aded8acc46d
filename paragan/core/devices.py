"""The devices of this host, and how this process uses the CPU's memory.

What differs between kinds of devices is in `core/backends.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from paragan.core.backends import Backend, ContextManager, CudaBackend, MpsBackend, XpuBackend

BACKENDS: dict[str, Backend] = {"cpu": Backend(), "cuda": CudaBackend(), "xpu": XpuBackend(), "mps": MpsBackend()}

PR_SET_THP_DISABLE = 41  # of sys/prctl.h

# Of malloc.h. M_TRIM_THRESHOLD: never; M_TOP_PAD: grow by 64 MB; M_MMAP_THRESHOLD: 32 MB and more are mapped.
MALLOC_OPTIONS = {-1: -1, -2: 64 << 20, -3: 32 << 20}


def backend_of(device: torch.device) -> Backend:
    """Return the backend of a device."""
    return BACKENDS[device.type]


def resolve_device_kind(kind: str) -> str:
    """Return the kind of a device; `auto` is CUDA if available, else the CPU."""
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
        dist_backend: the backend of the group, such as "gloo", "nccl" or "cpu:gloo,cuda:nccl".
    """
    for kind, backend in BACKENDS.items():
        library = backend.dist_backend.rpartition(":")[2]
        if library != "gloo" and library in dist_backend:  # whoever formed the group has set the device
            return torch.device(kind, torch.get_device_module(kind).current_device())
    return torch.device("cpu")


def release_memory(device: torch.device) -> None:
    """Give back memory of an accelerator that nothing refers to any more, which may wait for the garbage collector."""
    if device.type != "cpu":
        gc.collect()
        backend_of(device).empty_cache(device)


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
