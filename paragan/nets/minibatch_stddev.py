"""Minibatch standard deviation: D sees how much the images of a group differ (Karras et al. 2018, section 3)."""

import torch
from torch import Tensor, nn


class MinibatchStddev(nn.Module):
    """[N, C, H, W] -> [N, C + 1, H, W]: one more channel, the mean standard deviation within a group of images.

    Groups are consecutive images of one lane, so what a rank computes does not depend on the other lanes of its pass.
    The protocol of layers that couple images (game/player.py) sets `lane_batch`; nothing is summed over lanes.

    Args:
        group: images of a group: the largest divisor of a lane that is not greater.
    """

    def __init__(self, group: int):
        super().__init__()
        self.group = group
        self.lane_batch: int | None = None
        self.tracking = False
        self.moments = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        lane = self.lane_batch if self.lane_batch and rows % self.lane_batch == 0 else rows
        group = next(size for size in range(min(self.group, lane), 0, -1) if lane % size == 0)
        maps = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(0, (-1, group))
        deviation = (maps.var(1, correction=0) + 1e-8).sqrt().mean((1, 2, 3))
        channel = deviation.repeat_interleave(group).to(x.dtype)[:, None, None, None]
        return torch.cat([x, channel.expand(-1, 1, *x.shape[2:])], 1)

    def apply_moments(self) -> None:
        pass
