"""Compile a whole pass on a CPU (forward, backward and in-place writes) with torch's inductor.

`torch.compile` of a network ends where autograd begins, and a penalty cannot differentiate it twice. Here the
operations are traced with autograd already done: those between convolutions and matrix products fuse into a few loops,
and nothing goes through Python or the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._pytree import tree_leaves

from paragan.core.errors import RunError

MAX_TABLE_ROWS = 64  # up to so many rows, a matrix product is faster than a look-up

aten = torch.ops.aten


def compile_pass(action: Callable[[], Sequence[Tensor]], backend: str = "inductor") -> Callable[[], Sequence[Tensor]]:
    """Return a compiled `action`, which reads and writes the same tensors every time.

    It is traced now, without being computed, and compiled in its first call.

    Raises:
        RunError: if what it does depends on values of tensors, or cannot be compiled.
    """
    try:  # in fake mode operations only compute shapes; real tensors that are used become constants of the program
        with _UndoWrites():
            listed = make_fx(lambda: list(action()), DECOMPOSITIONS, "fake", _allow_non_fake_inputs=True)()
    except Exception as error:
        raise _compile_error("traced", error) from error
    compiled = torch.compile(  # pyright: ignore[reportUnknownMemberType]
        listed, fullgraph=True, dynamic=False, backend=backend
    )

    is_compiled = False

    @torch.no_grad()
    def run() -> Sequence[Tensor]:
        nonlocal is_compiled
        try:
            outputs = compiled()
        except (RuntimeError, OSError) as error:
            if is_compiled:
                raise
            raise _compile_error("compiled", error) from error
        is_compiled = True
        return outputs

    return run


class _UndoWrites(TorchDispatchMode):
    """Restores the real tensors that a trace writes to: an operation without fake tensors is really executed.

    Operations that read a value of a tensor are refused, since the program would keep that value.
    """

    def __init__(self):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.saved_tensors: dict[Tensor, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("it reads a value of a tensor")
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable and not any(isinstance(x, FakeTensor) for x in tensors):
            with _disable_current_modes():
                self.saved_tensors |= {x: x.detach().clone() for x in tensors if x not in self.saved_tensors}
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # pyright: ignore[reportUnknownMemberType]
        for tensor, value in reversed(self.saved_tensors.items()):  # some may share memory
            tensor.copy_(value)


def _compile_error(action: str, error: Exception) -> RunError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return RunError(
        f"device.capture_passes=true: a pass could not be {action} ({lines[0]}). Use --device.capture_passes=false"
    )


def _embedding_as_matmul(table: Tensor, rows: Tensor, *about: Any) -> Any:
    """Look up rows of a small table by a matrix product, since look-ups are not vectorised. One NaN row spoils all."""
    return _one_hot(rows, len(table), table) @ table if len(table) <= MAX_TABLE_ROWS and rows.dim() else NotImplemented


def _embedding_backward_as_matmul(grad: Tensor, rows: Tensor, count: int, padding: int, by_frequency: bool) -> Any:
    """Return the gradient of the table."""
    if count > MAX_TABLE_ROWS or not rows.dim() or padding >= 0 or by_frequency:
        return NotImplemented
    return _one_hot(rows.flatten(), count, grad).T @ grad.flatten(0, -2)


def _one_hot(rows: Tensor, count: int, like: Tensor) -> Tensor:
    """[...] -> [..., count]: 1 at the index, 0 elsewhere."""
    return (rows[..., None] == torch.arange(count, device=rows.device)).to(like.dtype)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: _embedding_as_matmul,
    aten.embedding_dense_backward.default: _embedding_backward_as_matmul,
}
