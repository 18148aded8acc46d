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


class Footprint(TorchDispatchMode):
    """Counts the bytes of the tensors made inside that are alive, `now`, and the most there were, `peak`; and `flops`,
    multiplications and additions separately (torch's own counter cannot be used with a gradient of a gradient).

    there: tensors from before, which are counted too.
    """

    def __init__(self, there: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.flops = 0.0
        self._seen = weakref.WeakSet[Any]()
        self._look(there)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.flops += _flops(func._overloadpacket, args, kwargs or {}, out)
        self._look(tree_leaves(out))
        return out

    def _look(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                self._note(tensor.untyped_storage())

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._seen.add(storage)
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, size: int) -> None:
        self.now -= size


def _flops(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> float:
    """By torch's formulas, but for the gradient of a convolution's weight: theirs takes groups for one (as of 2.13)."""
    if packet is torch.ops.aten.convolution_backward:
        grad, x, weight, transposed, wanted = *args[:3], args[7], args[10]
        return conv_flop_count(x.shape, weight.shape, grad.shape, transposed) * sum(wanted[:2])
    return flop_registry[packet](*args, **kwargs, out_val=out) if packet in flop_registry else 0.0


@dataclass(frozen=True)
class Foreseen:
    """flops : multiplications and additions, counted separately;  peak_bytes : of all tensors at one time"""

    flops: float
    peak_bytes: int


@contextlib.contextmanager
def imagined() -> Iterator[None]:
    """Inside, tensors have a shape and no storage, and nothing is computed: a network that does not fit into this
    machine can be asked about."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def foresee(play: Callable[[], object]) -> Foreseen:
    """What `play` would take, from nothing on: networks that it makes are counted, and what it returns is alive at the
    end. Not counted is what libraries take for themselves: scratch memory of convolutions, the interpreter."""
    with imagined(), Footprint() as counted:
        kept = play()
    del kept
    return Foreseen(counted.flops, counted.peak)
