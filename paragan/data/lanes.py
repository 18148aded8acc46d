"""Lanes: which images this rank sees, as a function of (seed, lane, position)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch
from ..rng import CPU, Draw, generator, shuffled


class Lanes:
    """Batches of a rank's lanes, one position after the other.

    The total batch at position p (in images) is images p .. p + batch of an endless sequence of shuffled
    epochs; lane l takes its l-th part. Nothing is saved: `start` says where to go on.

    images : [N, H, W, C] uint8;  labels : [N] int64 or None
    owned  : the lanes of this rank, of `lanes` in all
    merge  : how many lanes share one pass (0: all that this rank owns)
    stride : images from one position to the next (0: batch)
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray | None,
        *,
        owned: tuple[int, ...],
        lanes: int,
        batch: int,
        seed: int,
        start: int = 0,
        mirror: bool = False,
        merge: int = 0,
        stride: int = 0,
        device: torch.device = CPU,
        channels_last: bool = True,
    ):
        self.images, self.labels, self.mirror = images, labels, mirror
        self.batch, self.per_lane, self.seed, self.device = batch, batch // lanes, seed, device
        size = merge or len(owned)
        self.passes = [owned[i : i + size] for i in range(0, len(owned), size)]
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.hands: list[Batch] = []
        self._next, self.stride = start, stride or batch

    def next(self) -> list[Batch]:
        """The hands of the next position: one Batch a pass. Made here and now: a thread that makes images in
        memory ahead costs more, by taking turns with this one, than they do."""
        self.hands = [self.hand(self._next, lanes) for lanes in self.passes]
        self._next += self.stride
        return self.hands

    def hand(self, position: int, lanes: tuple[int, ...]) -> Batch:
        """What these lanes see at this position."""
        index = np.concatenate([self.index(position, lane) for lane in lanes])
        labels = None if self.labels is None else torch.from_numpy(self.labels[index]).to(self.device)
        draw = Draw(self.seed, position, lanes, self.per_lane, self.device)
        return Batch(self._to_device(self.images[index], position, lanes), labels, draw)

    def index(self, position: int, lane: int) -> np.ndarray:
        """[per_lane] which images of the data a lane sees at a position."""
        at = position + lane * self.per_lane + np.arange(self.per_lane)
        size = len(self.images)
        index = np.empty(self.per_lane, np.int64)
        for epoch in range(at[0] // size, at[-1] // size + 1):
            inside = at // size == epoch
            index[inside] = shuffled(self.seed, epoch, size)[at[inside] % size]
        return index

    def _to_device(self, pixels: np.ndarray, position: int, lanes: tuple[int, ...]) -> Tensor:
        """[N, H, W, C] uint8 -> [N, C, H, W] float32 in [-1, 1], in the device's layout."""
        if self.mirror:
            flip = np.concatenate(
                [generator(self.seed, "mirror", lane, position).random(self.per_lane) < 0.5 for lane in lanes]
            )
            pixels[flip] = pixels[flip, :, ::-1]
        x = torch.from_numpy(pixels)
        if self.device.type == "cuda":
            x = x.pin_memory().to(self.device, non_blocking=True)
        x = x.permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        return x.float().div_(127.5).sub_(1)
