"""CUDA tensors without memory (FakeTensor), on a build of torch for CPUs: shapes, strides and devices of operations."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Generator
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

CUDA, META = 1, 14  # of c10/core/DeviceType.h
NUM_DEVICE_TYPES = 21


@contextlib.contextmanager
def fake_cuda() -> Generator[torch.device]:
    """Let tensors that are made inside be fake; those on the device that is returned count as CUDA tensors.

    An operation that mixes devices raises FakeTensorDeviceMismatchError, one whose result the host has to see
    DataDependentOutputException. Backward does not run: autograd asks for streams, which a build for CPUs lacks.
    """
    with _device_guard(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield torch.device("cuda", 0)


@contextlib.contextmanager
def _device_guard() -> Generator[None]:
    """Let CUDA have the guard of the meta device, which does nothing, where the build has none: views ask for it."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    guards = (ctypes.c_void_p * NUM_DEVICE_TYPES).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[CUDA]
    guards[CUDA] = before or guards[META]
    try:
        yield
    finally:
        guards[CUDA] = before
