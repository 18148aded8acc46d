"""A pass on a CPU as one program: forward, backward and what they write, traced once and compiled by torch's inductor.

What `torch.compile` makes of a network ends where autograd begins, and no penalty can differentiate it twice. Here
autograd has done its work when the operations are listed: what is between convolutions and products becomes a few
loops, and nothing asks Python or the dispatcher what comes next.
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

MAX_TABLE_ROWS = 64  # rows of a table that are worth multiplying with, instead of looking them up

aten = torch.ops.aten


def compile_pass(action: Callable[[], Sequence[Tensor]], backend: str = "inductor") -> Callable[[], Sequence[Tensor]]:
    """What `action` computes of the tensors that it knows, and writes into them: on the same memory every time.

    It is traced now, without being computed, and compiled when it is first called. Failed where what it does depends on
    the numbers it meets, or cannot be compiled here."""
    try:  # in fake mode operations tell shapes; tensors that are met become the program's, as they are
        with _UndoWrites():
            listed = make_fx(lambda: list(action()), DECOMPOSITIONS, "fake", _allow_non_fake_inputs=True)()
    except Exception as error:
        raise _compile_error("traced", error) from error
    compiled = torch.compile(  # pyright: ignore[reportUnknownMemberType]
        listed, fullgraph=True, dynamic=False, backend=backend
    )

    built = False

    @torch.no_grad()
    def run() -> Sequence[Tensor]:
        nonlocal built
        try:
            made = compiled()
        except (RuntimeError, OSError) as error:
            if built:
                raise
            raise _compile_error("compiled", error) from error
        built = True
        return made

    return run


class _UndoWrites(TorchDispatchMode):
    """Leaves the tensors that a trace meets as they were: what writes one, with nothing fake, is played for real. What
    asks for a number is refused, since that would stay what it is now."""

    def __init__(self):
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.saved_tensors: dict[Tensor, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("it asks a tensor for a number")
        met = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable and not any(isinstance(x, FakeTensor) for x in met):
            with _disable_current_modes():
                self.saved_tensors |= {x: x.detach().clone() for x in met if x not in self.saved_tensors}
        return func(*args, **(kwargs or {}))

    @torch.no_grad()
    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # pyright: ignore[reportUnknownMemberType]
        for tensor, value in reversed(self.saved_tensors.items()):  # some may share memory
            tensor.copy_(value)


def _compile_error(action: str, error: Exception) -> RunError:
    said = str(error).strip().splitlines() or [type(error).__name__]
    return RunError(
        f"device.capture_passes: a pass could not be {action} ({said[0]}); use --device.capture_passes=false"
    )


def _embedding_as_matmul(table: Tensor, rows: Tensor, *about: Any) -> Any:
    """Rows of a small table, as a product: loops that look numbers up are not vectorised. (Where one row is NaN, all
    are.)"""
    return _one_hot(rows, len(table), table) @ table if len(table) <= MAX_TABLE_ROWS and rows.dim() else NotImplemented


def _embedding_backward_as_matmul(grad: Tensor, rows: Tensor, count: int, padding: int, by_frequency: bool) -> Any:
    """The table's gradient."""
    if count > MAX_TABLE_ROWS or not rows.dim() or padding >= 0 or by_frequency:
        return NotImplemented
    return _one_hot(rows.flatten(), count, grad).T @ grad.flatten(0, -2)


def _one_hot(rows: Tensor, count: int, like: Tensor) -> Tensor:
    """[...] -> [..., count]: 1 where a row is, 0 elsewhere."""
    return (rows[..., None] == torch.arange(count, device=rows.device)).to(like.dtype)


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.embedding.default: _embedding_as_matmul,
    aten.embedding_dense_backward.default: _embedding_backward_as_matmul,
}
