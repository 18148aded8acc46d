"""Tensors whose numbers are not computed: code runs on them unchanged, and costs neither memory nor time.

Inside `SkipComputeMode` a large tensor is memory that is reserved and never touched. What operations would write into
it is not computed. While its rank handles numbers (`charging`), each such operation is charged as a pass over memory.
Tensors of at most MAX_COMPUTED_NUMEL numbers are computed, starting from zeros, since code looks at their values.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from paragan.comm.bucket import Bucket, Exchange, ExchangeEvent
from paragan.comm.compression.compressors import Compressor
from paragan.comm.process_group import Work
from paragan.comm.traffic import Traffic
from paragan.core.errors import UsageError

MAX_COMPUTED_NUMEL = 4096  # operations on at most this many numbers are computed

Charge = Callable[[str, int], None]  # (operation, numbers)


class SkipComputeMode(TorchDispatchMode):
    """Skip operations on more than MAX_COMPUTED_NUMEL numbers, and charge them where `charging`."""

    def __init__(self, charge: Charge):
        super().__init__()
        self.charge = charge
        self._is_charging = False

    @contextlib.contextmanager
    def charging(self) -> Generator[None]:
        """Charge the operations inside."""
        before = self._is_charging
        self._is_charging = True
        try:
            yield
        finally:
            self._is_charging = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kind = _kind_of(func)
        if kind == "view":
            return func(*args, **kwargs)
        if kind == "factory":
            dtype = kwargs.get("dtype") or (args[0].dtype if isinstance(args[0], Tensor) else torch.float32)
            return _reserve(_factory_shape(func, args), dtype)
        numel = _max_numel(args)
        if kwargs:
            numel = max(numel, _max_numel(kwargs.values()))
        if numel <= MAX_COMPUTED_NUMEL:
            return func(*args, **kwargs)
        if self._is_charging:
            self.charge("pass", numel)
        if kind == "in place":
            return kwargs.get("out", args[0])
        try:
            result = func(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
        except NotImplementedError as error:
            raise UsageError(
                f"{_op_name(func)} of {numel} numbers: its result depends on them, and a prediction has none. "
                "Use an operation whose result always has the same shape"
            ) from error
        if _op_name(func) == "all":  # numbers are finite, equal, ...
            return torch.ones(result.shape, dtype=result.dtype)
        return tree_map(_reserve_like, result)


def compute_all() -> contextlib.AbstractContextManager[object]:
    """Return a context in which operations are computed, for code whose tensors are all small."""
    return torch._C._DisableTorchDispatch()  # pyright: ignore


# Operations that make a tensor -> the number of the argument that is its shape, or like which it is.
FACTORY_OPS = {"empty": 0, "zeros": 0, "empty_like": 0, "zeros_like": 0, "new_empty": 1, "new_zeros": 1}

OpKind = Literal["view", "factory", "in place", "other"]


@functools.cache
def _kind_of(func: Any) -> OpKind:
    """Return what an operation does with memory."""
    if _op_name(func) in FACTORY_OPS:
        return "factory"
    aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
    if any(not alias.is_write for alias in aliases):
        return "view"
    return "in place" if aliases else "other"


def _op_name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _factory_shape(func: Any, args: tuple[Any, ...]) -> Any:
    argument = args[FACTORY_OPS[_op_name(func)]]
    return argument.shape if isinstance(argument, Tensor) else argument


def _max_numel(values: Iterable[Any]) -> int:
    """Return the most numbers of a tensor among these values and the lists in them."""
    numel = 0
    for value in values:
        if isinstance(value, Tensor):
            numel = max(numel, value.numel())
        elif isinstance(value, list | tuple):
            numel = max(numel, _max_numel(value))
    return numel


def _reserve(shape: Any, dtype: torch.dtype) -> Tensor:
    """Make a tensor with undefined contents; zeros if it is so small that operations on it are computed."""
    x = torch.empty(shape, dtype=dtype)
    return x.zero_() if x.numel() <= MAX_COMPUTED_NUMEL else x


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value


def _reserve_like(value: Any) -> Any:
    return _reserve(value.shape, value.dtype) if isinstance(value, Tensor) else value


# What is charged ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChargedCompressor:
    """A compressor whose work is charged and not done. Everything else is that of the compressor."""

    wire: Compressor
    charge: Charge

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def encode(self, x: Tensor, out: Tensor, seed: int) -> None:
        self.charge(f"{self.wire.name}/encode", x.numel())

    def decode(self, data: Tensor, out: Tensor) -> None:
        self.charge(f"{self.wire.name}/decode", out.numel())


def with_charged_wires(strategy: Any, charge: Charge) -> Any:
    """Return a copy of the strategy whose wires charge their work."""
    charged = copy.copy(strategy)
    for field in ("wire", "snapshot_wire"):
        if hasattr(strategy, field):
            wire = cast(Compressor, ChargedCompressor(getattr(strategy, field), charge))
            object.__setattr__(charged, field, wire)
    return charged


@dataclass(frozen=True)
class ChargedExchange:
    """An exchange whose operations are charged."""

    exchange: Exchange
    mode: SkipComputeMode

    def __call__(self, bucket: Bucket, step: int) -> Generator[Work | ExchangeEvent]:
        with contextlib.closing(self.exchange(bucket, step)) as generator:
            while True:
                with self.mode.charging():
                    awaited = next(generator, None)
                if awaited is None:
                    return
                yield awaited

    def traffic(self, n: int, itemsize: int) -> Traffic:
        return self.exchange.traffic(n, itemsize)
