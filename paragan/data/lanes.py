"""Lanes: which images this rank sees, as a function of (seed, lane, position)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from paragan.core.devices import kind_of
from paragan.core.rng import CPU, Draw, generator, shuffled
from paragan.core.types import Batch
from paragan.data.loader.device_transfer import Upload, floats, upload
from paragan.data.loader.prefetch import Feed, Order, Pipeline
from paragan.data.streaming import Streamed

LOOK_S = 0.2  # how often one who waits looks around


class Lanes:
    """Batches of a rank's lanes, one position after the other.

    The total batch at position p (in images) is images p .. p + batch(p) of an endless sequence of shuffled
    epochs; lane l takes its l-th part. Nothing is saved: `start` says where to go on.

    images : [N, H, W, C] uint8, in memory or streamed, or float32 [N, ...];  labels : [N] int64 or None
    owned  : the lanes of this rank, of `lanes` in all
    merge  : how many lanes share one pass (0: all that this rank owns)
    batch  : of all lanes, everywhere or at a position
    stride : images from one position to the next (0: batch)
    feed, cores : how streamed images are read ahead, and the processors this rank may use for it
    """

    def __init__(
        self,
        images: np.ndarray | Streamed,
        labels: np.ndarray | None,
        *,
        owned: tuple[int, ...],
        lanes: int,
        batch: int | Callable[[int], int],
        seed: int,
        start: int = 0,
        mirror: bool = False,
        merge: int = 0,
        stride: int = 0,
        device: torch.device = CPU,
        channels_last: bool = True,
        feed: Feed | None = None,
        cores: int | None = None,
    ):
        self.images, self.labels, self.mirror = images, labels, mirror
        self.lanes, self.seed, self.device = lanes, seed, device
        self.batch: Callable[[int], int] = (lambda position: batch) if isinstance(batch, int) else batch
        size = merge or len(owned)
        self.passes = [owned[i : i + size] for i in range(0, len(owned), size)]
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.hands: list[Batch] = []
        self._next, self._stride = start, stride
        self._feed, self._cores = feed, cores
        self.pipeline: Pipeline | None = None
        self._upload: Upload | None = None
        self._taken: list[Tensor | None] = []  # of the next position
        self.meanwhile: Callable[[], object] = lambda: None  # called while `next` waits; may raise

    def next(self) -> list[Batch]:
        """The hands of the next position: one Batch a pass. Images in memory are gathered here and now: a thread that
        does it ahead costs more, by taking turns with this one, than they do. Others come from a pipeline."""
        while not self.wait(LOOK_S):
            self.meanwhile()
        taken, self._taken = self._taken or [None] * len(self.passes), []
        self.hands = [self.hand(self._next, lanes, images) for lanes, images in zip(self.passes, taken)]
        self._next = self._after(self._next)
        return self.hands

    def wait(self, timeout_s: float) -> bool:
        """Wait until `next` need not, for each of its batches so long at most; whether it is so. Raises what went wrong
        with them."""
        ahead = self._ahead()
        while ahead and len(self._taken) < len(self.passes):
            if not ahead.wait(timeout_s):
                return False
            self._taken.append(ahead.take())
        return True

    def _after(self, position: int) -> int:
        return position + (self._stride or self.batch(position))

    def per_lane(self, position: int) -> int:
        """Images of a lane."""
        return self.batch(position) // self.lanes

    def rounds_ahead(self) -> int:
        """For how many positions after the next one the pipeline has all batches."""
        if self.pipeline is None:
            return 0
        return self.pipeline.complete() // len(self.passes)

    def _ahead(self) -> Upload | None:
        if self._upload is None and isinstance(self.images, Streamed):
            pinned = kind_of(self.device).streams
            self.pipeline = Pipeline(self.images, self.plan(self._next), self._feed, pinned=pinned, cores=self._cores)
            self._upload = upload(self.pipeline, self.device, self.memory_format)
        return self._upload

    def hand(self, position: int, lanes: tuple[int, ...], images: Tensor | None = None) -> Batch:
        """What these lanes see at this position. images : theirs, where they are here already."""
        order = self.order(position, lanes)
        images = self._gathered(order) if images is None else images
        labels = None if self.labels is None else torch.from_numpy(self.labels[order.index]).to(self.device)
        return Batch(images, labels, Draw(self.seed, position, lanes, self.per_lane(position), self.device))

    def plan(self, position: int) -> Iterator[Order]:
        """Which images every pass holds, from a position on, without end."""
        while True:
            for lanes in self.passes:
                yield self.order(position, lanes)
            position = self._after(position)

    def order(self, position: int, lanes: tuple[int, ...]) -> Order:
        """Which images these lanes see at this position, and which of them mirrored."""
        index = np.concatenate([self.index(position, lane) for lane in lanes])
        if not self.mirror:
            return Order(index)
        count = self.per_lane(position)
        flips = [generator(self.seed, "mirror", lane, position).random(count) < 0.5 for lane in lanes]
        return Order(index, np.concatenate(flips))

    def index(self, position: int, lane: int) -> np.ndarray:
        """[per_lane] which images of the data a lane sees at a position."""
        count = self.per_lane(position)
        at = position + lane * count + np.arange(count)
        size = len(self.images)
        index = np.empty(count, np.int64)
        for epoch in range(at[0] // size, at[-1] // size + 1):
            inside = at // size == epoch
            index[inside] = shuffled(self.seed, epoch, size)[at[inside] % size]
        return index

    def told(self) -> dict[str, float]:
        """What a line of stats says of the pipeline; nothing where there is none."""
        return self.pipeline.told() if self.pipeline else {}

    def decisions(self) -> list[str]:
        """What its tuner changed since this was last asked for."""
        return self.pipeline.decisions() if self.pipeline else []

    def close(self) -> None:
        """Let the pipeline go, if there is one."""
        if self.pipeline and self._upload:
            self._upload.close()  # first: it may be asking the pipeline for more
            self.pipeline.close()
        self.pipeline = self._upload = None
        self._taken = []

    def _gathered(self, order: Order) -> Tensor:
        """[N, C, H, W] float32 in [-1, 1] (of numbers: [N, ...] as they are) on the device, read on the spot."""
        pixels = self.images[order.index]
        if order.flip is not None:
            pixels[order.flip] = pixels[order.flip, :, ::-1]
        x = torch.from_numpy(pixels)
        x = x.pin_memory() if kind_of(self.device).streams else x
        return floats(x.to(self.device, non_blocking=True), self.memory_format)
