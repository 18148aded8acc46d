"""A stand-in accelerator for tests: device `mock:0`, whose kernels are those of the CPU on memory of the host.

Tensors of it are plain tensors of PyTorch's PrivateUse1 backend with storages of their own, so views, autograd,
`data_ptr` and optimizers work as on any accelerator. An operation on them is run on tensors of the CPU that share their
memory: numbers equal those of the CPU bit for bit. What a card would not forgive is refused or recorded:

    * a tensor of the host (of one or more dimensions) in an operation of the device is an error
    * whatever makes the host wait for the device is recorded with the line that caused it (`syncs.py`)
    * asynchronous copies arrive when they are waited for, and until then their destination holds garbage; an operation
      on one stream that uses what another stream has not finished is an error (`streams.py`)
    * the peak of allocated bytes is known (`memory.py`)

There is one device in each process.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from standin import autocast, memory, streams, syncs

NAME = "mock"
META, PRIVATE_USE_1 = 14, 20  # of c10/core/DeviceType.h
UNCHECKED_SET_DEVICE, EXCHANGE_STREAM = 4, 9  # virtual functions of c10/core/impl/DeviceGuardImplInterface.h
DL_CPU, DL_EXTENSION = 1, 12  # device types of DLPack
CPU = torch.device("cpu")
HOST_INDICES_ALLOWED = {"aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put"}
MASK_OPS = HOST_INDICES_ALLOWED | {"aten::_unsafe_index", "aten::_unsafe_index_put"}
SYNCHRONISING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_aten = torch.ops.aten
NOT_COMPOSED = {  # operations that torch would make of others, which round differently, if they had no kernel
    name: getattr(getattr(_aten, name.partition(".")[0]), name.partition(".")[2] or "default")
    for name in (
        *("convolution", "convolution_backward", "native_group_norm", "native_layer_norm"),
        *("silu_backward", "mish_backward", "index.Tensor", "addr", "native_channel_shuffle"),
    )
}
_cpu_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_kept: list[object] = []  # what must not be collected


class DeviceModule:
    """`torch.mock`, with the interface of `torch.cuda`."""

    Stream, Event = streams.Stream, streams.Event
    stream = staticmethod(streams.stream)
    current_stream = staticmethod(streams.current_stream)
    synchronize = staticmethod(streams.synchronize)

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: object) -> None:
        pass

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: object = 0) -> str:
        return "stand-in"

    def max_memory_allocated(self, device: object = 0) -> int:
        return memory.peak_bytes()

    def empty_cache(self) -> None:
        pass

    def reset_peak_memory_stats(self, device: object = 0) -> None:
        memory.reset_peak()

    def get_device_properties(self, device: object = 0) -> SimpleNamespace:
        return SimpleNamespace(name=self.get_device_name(), total_memory=memory.limit_bytes)

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: object = 0) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: object = 0) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def is_installed() -> bool:
    """Return whether this process has the device."""
    return bool(_kept)


def register() -> None:
    """Register the device in this process, once."""
    _setup_privateuseone_for_python_backend(NAME, DeviceModule())
    _let_exceptions_leave_backward()
    fallback = torch.library.Library("_", "IMPL")
    fallback.fallback(run, "PrivateUse1")
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("copy_", _copy, "PrivateUse1")
    kernels.impl("resize_", _resize, "PrivateUse1")
    for name, op in NOT_COMPOSED.items():
        kernels.impl(name, functools.partial(run, op), "PrivateUse1")
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        kernels.impl("scaled_dot_product_attention", _attention, key)
    autocast.register(kernels)
    torch.UntypedStorage.clone = _clone_storage  # for deepcopy: torch would ask an allocator of C++
    _kept.extend([fallback, kernels])


def _let_exceptions_leave_backward() -> None:
    """Let exceptions leave a backward pass on the device.

    Autograd then sets device and stream back to what they were. There is one device and torch knows no streams of it,
    but the guard of backends in Python (torch 2.13) calls Python to find that out, which ends the process if an
    exception is under way. Its two functions are replaced by those of the meta device, which do nothing.
    """
    c10 = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    guards = (ctypes.c_void_p * (PRIVATE_USE_1 + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    size = ctypes.sizeof(ctypes.c_void_p)
    of_meta, of_device = (ctypes.c_void_p.from_address(guards[kind] or 0) for kind in (META, PRIVATE_USE_1))
    table_type = ctypes.c_void_p * 30
    table = table_type(*table_type.from_address((of_device.value or 0) - 2 * size))  # two entries precede the first
    for function in (UNCHECKED_SET_DEVICE, EXCHANGE_STREAM):
        table[2 + function] = ctypes.c_void_p.from_address((of_meta.value or 0) + function * size).value
    of_device.value = ctypes.addressof(table) + 2 * size
    _kept.append(table)


def is_on_device(x: object) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


def to_host_alias(x: Tensor) -> Tensor:
    """Return a CPU tensor that shares the memory of a tensor of the device."""
    return _change_device(x, DL_CPU)


def to_device_alias(x: Tensor) -> Tensor:
    """Return a tensor of the device that shares the memory of a CPU tensor, and holds it."""
    y = _change_device(x, DL_EXTENSION)
    memory.on_allocation(y)
    streams.on_allocation(y)
    return y


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation whose arguments or results are on the device: by the kernel of the CPU."""
    traits = _traits(op)
    if traits.is_view:
        return op.redispatch(_cpu_keys, *args, **kwargs)
    flat: list[Any] = []
    _map(flat.append, [*args, *kwargs.values()])
    inputs = [x for x in flat if is_on_device(x)]
    if inputs:
        _refuse_host_tensors(op, flat)
        _record_sync(op, traits, args)
    if any(isinstance(x, torch.Generator) for x in flat):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' ({op.name()})")
    written = _written_arguments(traits, args, kwargs)
    streams.before_kernel(reads=inputs, writes=written, name=op.name())
    originals: dict[int, tuple[Tensor, Tensor]] = {}

    def to_host(x: Any) -> Any:
        if is_on_device(x):
            is_empty_output = x.shape == (0,) and any(x is w for w in written)
            alias = torch.empty(0, dtype=x.dtype) if is_empty_output else to_host_alias(x)
            originals[id(alias)] = x, alias
            return alias
        return CPU if isinstance(x, torch.device) and x.type == NAME else x

    def to_device(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        return originals[id(y)][0] if id(y) in originals else to_device_alias(y)

    host_args = _map(to_host, list(args))
    host_kwargs = {name: _map(to_host, value) for name, value in kwargs.items() if name != "pin_memory"}
    has_wrapped = any(isinstance(x, (int, float, complex)) for i, x in enumerate(host_args) if i in traits.tensors)
    result = (op._overloadpacket if has_wrapped else op)(*host_args, **host_kwargs)  # see `_OpTraits.tensors`
    for x, alias in originals.values():
        if x.shape != alias.shape:
            _give_memory(x, alias)  # an output that was empty
    return _map(to_device, result)


@dataclass(frozen=True)
class _OpTraits:
    """Facts about an operation, from its schema.

    is_view     : its result shares memory with an argument
    written     : arguments it writes to: position and name
    tensors     : positions of arguments that are tensors; torch hands numbers that it has wrapped as tensors to a
                  fallback in Python as numbers, which another overload takes
    waits       : the host has to wait for its result
    """

    is_view: bool
    written: tuple[tuple[int, str], ...]
    tensors: frozenset[int]
    waits: bool


@functools.cache
def _traits(op: Any) -> _OpTraits:
    schema = op._schema
    returns_numbers = any(str(r.type) in ("bool", "number", "int", "float") for r in schema.returns)
    arguments = list(enumerate(schema.arguments))
    return _OpTraits(
        is_view=schema.name == "aten::set_"
        or any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns),
        written=tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
        tensors=frozenset(i for i, a in arguments if str(a.type) == "Tensor"),
        waits=returns_numbers or bool(SYNCHRONISING_TAGS & set(op.tags)),
    )


def _map(function: Callable[[Any], Any], x: Any) -> Any:
    """Call a function of everything in lists and tuples."""
    return type(x)(_map(function, y) for y in x) if isinstance(x, (list, tuple)) else function(x)


def _change_device(x: Tensor, kind: int) -> Tensor:
    capsule = torch._C._to_dlpack(x.detach() if x.requires_grad else x)
    pointer = _capsule_pointer(capsule, b"dltensor")
    ctypes.c_int32.from_address(pointer + ctypes.sizeof(ctypes.c_void_p)).value = kind
    y = torch._C._from_dlpack(capsule)
    if y.stride() != x.stride():  # DLPack's strides of dimensions of size 1 are all 1
        y = _aten.as_strided.default.redispatch(_cpu_keys, y, x.size(), x.stride())
    return y


def _refuse_host_tensors(op: Any, flat: Sequence[Any]) -> None:
    if op._schema.name in HOST_INDICES_ALLOWED:
        return
    for x in flat:
        if isinstance(x, Tensor) and x.device.type == "cpu" and x.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu! "
                f"({op.name()}, of a host tensor of shape {list(x.shape)})"
            )


def _record_sync(op: Any, traits: _OpTraits, args: Sequence[Any]) -> None:
    """Record operations whose result the host has to wait for."""
    waits = traits.waits
    if op._schema.name in MASK_OPS:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        waits = any(x.dtype in (torch.bool, torch.uint8) or (x.device.type == "cpu" and x.dim()) for x in indices)
    if waits:
        syncs.record(op.name())
        streams.host_waits()


def _written_arguments(traits: _OpTraits, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    written: list[Tensor] = []
    for i, name in traits.written:
        value = args[i] if i < len(args) else kwargs.get(name)
        written += [x for x in (value if isinstance(value, (list, tuple)) else [value]) if is_on_device(x)]
    return written


def _give_memory(x: Tensor, host: Tensor) -> None:
    """Let a tensor of the device have the memory, shape and strides of a tensor of the host."""
    y = to_device_alias(host)
    _aten.set_.source_Storage_storage_offset.redispatch(_cpu_keys, x, y.untyped_storage(), 0, y.size(), y.stride())


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    device = NAME if storage.device.type == NAME else CPU
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage).clone().untyped_storage()


def _resize(x: Tensor, size: Sequence[int], memory_format: torch.memory_format | None = None) -> Tensor:
    host = torch.empty(size, dtype=x.dtype, memory_format=memory_format or torch.contiguous_format)
    if host.shape != x.shape:
        old = to_host_alias(x).flatten()
        host.view(-1)[: old.numel()] = old[: host.numel()]
        _give_memory(x, host)
    return x


def _copy(destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy between devices, or on the device."""
    if is_on_device(destination) and is_on_device(source):
        streams.before_kernel(reads=[source], writes=[destination], name="aten::copy_")
        to_host_alias(destination).copy_(to_host_alias(source))
    elif is_on_device(source):
        is_asynchronous = non_blocking and memory.is_pinned(destination)
        if not is_asynchronous:
            syncs.record("copy to the host")
        streams.copy_to_host(destination, source, to_host_alias(source), is_asynchronous)
    else:
        if not non_blocking:
            syncs.record("copy to the device")
        elif not memory.is_pinned(source):
            syncs.record("copy of pageable memory to the device")
        streams.copy_to_device(destination, to_host_alias(destination), source, non_blocking)
    return destination


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float | None = None, enable_gqa: bool = False
) -> Any:
    """Choose what the CPU would choose."""
    mask, dropout, is_causal = (*args, *(None, 0.0, False)[len(args) :])
    host = [x if x is None else to_host_alias(x) for x in (q, k, v, mask)]
    choice = _aten._fused_sdp_choice(*host, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    if choice == SDPBackend.FLASH_ATTENTION.value:
        fused = _aten._scaled_dot_product_flash_attention_for_cpu
        return fused(q, k, v, dropout, is_causal, attn_mask=mask, scale=scale)[0]
    composed = _aten._scaled_dot_product_attention_math
    return composed(q, k, v, mask, dropout, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
