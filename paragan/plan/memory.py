"""What a step takes in operations and in memory, found by playing it with tensors that have a shape and no numbers."""

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
    """Counts the bytes of the tensors made inside that are alive, `now`, and the most there were, `peak`; and `flops`,
    multiplications and additions separately (torch's own counter cannot be used with a gradient of a gradient).

    there: tensors from before, which are counted too.
    """

    def __init__(self, existing: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
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
    """By torch's formulas, but for the gradient of a convolution's weight: theirs takes groups for one (as of 2.13)."""
    if packet is torch.ops.aten.convolution_backward:
        grad, x, weight, transposed, wanted = *args[:3], args[7], args[10]
        return conv_flop_count(x.shape, weight.shape, grad.shape, transposed) * sum(wanted[:2])
    return flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0.0


@dataclass(frozen=True)
class RoundCost:
    """flops : multiplications and additions, counted separately;  peak_bytes : of all tensors at one time"""

    flops: float
    peak_bytes: int


@contextlib.contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Inside, tensors have a shape and no storage, and nothing is computed: a network that does not fit into this
    machine can be asked about."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def estimate(fn: Callable[[], object]) -> RoundCost:
    """What `play` would take, from nothing on: networks that it makes are counted, and what it returns is alive at the
    end. Not counted is what libraries take for themselves: scratch memory of convolutions, the interpreter."""
    with fake_tensor_mode(), ResourceCounterMode() as counted:
        kept = fn()
    del kept
    return RoundCost(counted.flops, counted.peak_bytes)
