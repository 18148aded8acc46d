"""Flat parameters of a replica: whatever backward adds to their gradients is exchanged, or refused in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paragan.comm.flat_params import FlatParams
from paragan.core.errors import UsageError

ANY_NUMBER = sys.maxsize  # of backward passes
NUM_TURN_MARKS = 3


def _no_op() -> None:
    pass


class GuardedParams(FlatParams):
    """Flat parameters that take gradients in turns only, and count them.

    label            : the replica, in messages
    names            : of the parameters, in the order of `parameters`
    has_simultaneous : whether turns of other replicas are open too; all is then sent at the end of the turn, since
                       messages of several replicas would otherwise leave in an order that depends on the rank
    before_exchange  : is called before the first gradient of a turn is sent
    marks            : exchanged at the end of the last bucket: `marks_of_turn`, then 1 for every parameter that got a
                       gradient, 0 for the others; None: the exchange would change them
    marks_of_turn    : [NUM_TURN_MARKS]
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        bucket_bytes: int,
        label: str,
        has_marks: bool,
        fragments: int = 1,
    ):
        like = named_parameters[0][1]
        marks = nn.Parameter(like.new_zeros(NUM_TURN_MARKS + len(named_parameters))) if has_marks else None
        named = [("marks", marks), *named_parameters] if marks is not None else named_parameters
        super().__init__(named, bucket_bytes, fragments)
        self.marks: Tensor | None = None
        self.marks_of_turn = [0.0] * NUM_TURN_MARKS
        if marks is not None:
            self.marks = marks.grad
            self.parameters.pop()
            self.slices.pop()
        self.label = label
        self.names = [name for name, _ in reversed(named_parameters)]
        self._views = [p.grad for p in self.parameters if p.grad is not None]
        self._counts = [0 for _ in self.parameters]
        self._max_passes = 0  # 0: no turn is open
        self._first_share = 1.0  # the first gradient is multiplied by this, as it is moved
        self._counted_version: int | None = None  # of `grads`, when the last gradient was counted
        self.has_simultaneous = False
        self.before_exchange: Callable[[], None] = _no_op
        self.register_hooks()

    def open(self, max_passes: int, share: float) -> None:
        """Take gradients of so many backward passes, and multiply their sum by `share`."""
        self._max_passes = max_passes
        self._first_share, self.share = (share, 1.0) if max_passes == 1 else (1.0, share)
        self._counts = [0 for _ in self.parameters]
        self._counted_version = None
        for p in self.parameters:
            p.grad = None  # the first gradient is moved to its view, which is faster than to add it to zeros

    def clear_grads(self) -> None:
        """Zero what no parameter has: the first gradient of a parameter overwrites what is there."""
        for bucket in self.buckets:
            bucket.zero_padding(bucket.grads)  # some wires deliver other numbers

    def close(self) -> None:
        """Take no gradients any more."""
        self._max_passes = 0
        self.before_exchange = _no_op  # which knows the replica

    @property
    def has_gradient(self) -> list[bool]:
        """Return which parameters got a gradient in this turn, in the order of `parameters`."""
        return [count > 0 for count in self._counts]

    def mark_backward_done(self) -> None:
        if self._next_bucket < len(self._awaited):
            for p, view, count in zip(self.parameters, self._views, self._counts):
                if not count:
                    view.zero_()
                    p.grad = view
            if self.marks is not None:
                self.marks.copy_(torch.tensor([*self.marks_of_turn, *map(float, self.has_gradient)]))
                self.marks.mul_(self._first_share)
        super().mark_backward_done()

    def take_marks(self) -> list[float]:
        """Return the marks as the exchange has averaged them."""
        assert self.marks is not None
        averaged: list[float] = self.marks.tolist()  # pyright: ignore[reportUnknownMemberType]
        self.marks.zero_()
        return averaged

    def count_gradient(self, number: int, p: Tensor) -> None:
        if torch.is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._count_gradient(number, p)
        else:
            self._count_gradient(number, p)

    def _count_gradient(self, number: int, p: Tensor) -> None:
        view = self._views[number]
        if not self._max_passes:
            p.grad = None
            name = self.names[number]
            raise UsageError(
                f"{name}: a backward pass outside a turn of {self.label} reaches it, and its gradient would be lost. "
                "Use turn.backward(loss), or run forward inside `with replica.turn():`, or detach() what is an input"
            )
        if p.grad is not view:  # the first, or after zero_grad() inside the turn, or with create_graph
            assert p.grad is not None
            self._move(p.grad, view)
            p.grad = view
        self._counts[number] += 1
        if self._counts[number] > self._max_passes:
            raise UsageError(self._too_many_passes(self.names[number]))
        if not self.has_simultaneous:
            self.before_exchange()
            super().count_gradient(number, p)
        self._counted_version = self.grads._version

    def _move(self, grad: Tensor, view: Tensor) -> None:
        """Write the gradient of one backward pass to its place in `grads`."""
        if not self._first_share:
            view.zero_()  # also what is not finite, such as the mean of no samples
        else:
            torch.mul(grad.to_dense() if grad.is_sparse else grad, self._first_share, out=view)

    def check_untouched(self) -> None:
        """Raise UsageError if gradients were changed or dropped after backward, when they may be under way."""
        for name, p, count, view in zip(self.names, self.parameters, self._counts, self._views):
            if count and p.grad is not view:
                raise UsageError(f"{name}: zero_grad() after backward drops its gradient. Leave zero_grad() out")
        if self._counted_version is not None and self.grads._version != self._counted_version:
            raise UsageError(
                f"{self.label}: its gradients are changed inside the turn, before they are averaged. "
                "Use max_norm and turn(scaler=scaler)"
            )

    def _too_many_passes(self, name: str) -> str:
        if self.has_simultaneous:
            return (
                f"{name}: got more gradients than the turn of {self.label} has backward passes, while another turn is "
                "open. Use turn.backward(loss), which reaches the parameters of that turn only"
            )
        return (
            f"{name}: got a gradient in backward pass {self._max_passes + 1} of a turn of {self.label} that has "
            f"{self._max_passes}. Use turn(backwards={self._max_passes + 1}), or turn(backwards=None) if their number "
            "varies"
        )
