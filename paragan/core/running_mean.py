"""A moving average over steps of rows that many passes and ranks contribute to."""

from typing import ClassVar

import torch
from torch import Tensor, nn


class RunningMean(nn.Module):
    """The moving average of the mean row of each step; 0 before the first.

    A forward pass in training mode only adds to `sum` and `count`, which the trainer sums over lanes and ranks
    (game/synchronised_buffers.py); `apply_synchronised`, once a step, moves the average.

    mean : [*shape]

    Args:
        decay: weight of the old average, per step with rows.
        shape: of a row.
    """

    synchronised: ClassVar[tuple[str, ...]] = ("sum", "count")
    needs_all_ranks: ClassVar[bool] = False  # ranks that train a player of their own have a mean of their own

    mean: Tensor
    sum: Tensor
    count: Tensor

    def __init__(self, decay: float, *shape: int):
        super().__init__()
        self.decay = decay
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("sum", torch.zeros(shape), persistent=False)
        self.register_buffer("count", torch.zeros(()), persistent=False)

    @torch.no_grad()
    def forward(self, rows: Tensor) -> Tensor:
        """Count rows [N, *shape], and return the average of the steps before."""
        if self.training:
            self.sum.add_(rows.to(self.sum.dtype).sum(0))
            self.count.add_(len(rows))
        return self.mean

    @torch.no_grad()
    def apply_synchronised(self) -> None:
        """Move the average by the rows of a step. Without any, nothing changes."""
        step_mean = self.sum / self.count.clamp(min=1)
        self.mean.copy_(torch.where(self.count > 0, torch.lerp(step_mean, self.mean, self.decay), self.mean))
        self.sum.zero_()
        self.count.zero_()
