"""Operations and peak memory of a computation, counted while it runs.

`estimate` runs it with fake tensors, which have a shape and no storage, so a network that does not fit into this
machine can be estimated. Not counted: memory of libraries, such as scratch memory of convolutions.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import conv_flop_count, flop_registry


class ResourceCounterMode(TorchDispatchMode):
    """Count tensor memory and operations of the code inside.

    live_bytes : bytes of the tensors that are alive
    peak_bytes : the largest value of live_bytes
    flops      : a multiplication and an addition count as two operations. (torch's own FlopCounterMode does not work
                 with gradients of gradients.)

    Args:
        existing: tensors made earlier that are counted too.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops = 0.0
        self._counted_storages = weakref.WeakSet[Any]()
        self._count_tensors(existing)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += _count_op_flops(func._overloadpacket, args, kwargs or {}, out)
        self._count_tensors(tree_leaves(out))
        return out

    def _count_tensors(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._counted_storages:
                self._count_storage(tensor.untyped_storage())

    def _count_storage(self, storage: torch.UntypedStorage) -> None:
        self._counted_storages.add(storage)
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release_bytes, storage.nbytes())

    def _release_bytes(self, size: int) -> None:
        self.live_bytes -= size


def _count_op_flops(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    """Use torch's formulas, except for the backward pass of a convolution: torch's ignores groups (as of 2.13)."""
    if packet is torch.ops.aten.convolution_backward:
        grad, x, weight = args[:3]
        transposed = args[7]
        output_mask = args[10]  # which of the gradients of x, weight and bias are computed
        return conv_flop_count(x.shape, weight.shape, grad.shape, transposed) * sum(output_mask[:2])
    return flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0.0


@dataclass(frozen=True)
class RoundCost:
    """Cost of one round on one rank."""

    flops: float  # a multiplication and an addition count as two operations
    peak_bytes: int  # of all tensors that are alive at one time


@contextlib.contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Make tensors inside without storage. Nothing is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def estimate(fn: Callable[[], object]) -> RoundCost:
    """Estimate what `fn` costs, including the networks that it creates. What it returns counts as alive at the end."""
    with fake_tensor_mode(), ResourceCounterMode() as counter:
        result = fn()
    del result  # only now, so that it was counted
    return RoundCost(counter.flops, counter.peak_bytes)
