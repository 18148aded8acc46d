"""Clipping of a player's gradient by its norm."""

from __future__ import annotations

import torch
from torch import Tensor

from paragan.comm.process_group import Group
from paragan.comm.traffic import Traffic, ring_all_reduce

ROW = 32768  # numbers that one thread sums: the result does not depend on the number of threads
EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def vector_norm(vector: Tensor) -> Tensor:
    """Return the norm ([] float32 or wider) of [P], which rounds alike for any number of threads."""
    dtype = torch.promote_types(vector.dtype, torch.float32)
    whole = len(vector) // ROW * ROW
    rows = _norms(vector[:whole].view(-1, ROW), dtype)
    rest = _norms(vector[whole:][None], dtype)
    return _norms(torch.cat([rows, rest])[None], dtype)[0]


def _norms(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=dtype)  # pyright: ignore


class GradientClip:
    """Scales a gradient to the norm `max_norm` if its norm is larger; the host waits for nothing.

    Args:
        grads: [P] the whole gradient of a player.
        max_norm: the largest norm.

    group : the ranks that have the gradient in parts, and 0 elsewhere; None: this rank has it whole. The norm of parts
            rounds otherwise
    """

    def __init__(self, grads: Tensor, max_norm: float):
        self.max_norm = max_norm
        self.group: Group | None = None
        self._grads = grads
        self._sum = torch.zeros((), dtype=torch.promote_types(grads.dtype, torch.float32), device=grads.device)
        self._steps = 0

    def clip(self) -> None:
        """Clip the gradient, and count its norm before that."""
        norm = vector_norm(self._grads)
        if self.group:
            total = norm.double().square()[None]
            self.group.all_reduce_sum(total).wait()
            norm = total[0].sqrt().to(norm.dtype)
        self._sum += norm
        self._steps += 1
        self._grads.mul_((self.max_norm / (norm + EPS)).clamp(max=1))

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages that one rank sends in a step."""
        return ring_all_reduce(8, self.group.size) if self.group else Traffic()

    def pop_norms(self) -> tuple[Tensor, int]:
        """Return the sum of the norms ([]) since the last call, and their number."""
        popped = self._sum.clone(), self._steps
        self._sum.zero_()
        self._steps = 0
        return popped
