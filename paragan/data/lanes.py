"""Lanes: which images this rank sees, as a function of (seed, lane, position)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from paragan.core.devices import backend_of
from paragan.core.rng import CPU, LaneRng, epoch_permutation, philox_generator
from paragan.core.types import Batch
from paragan.data.loader.device_transfer import Transfer, make_transfer, to_model_input
from paragan.data.loader.prefetch import BatchIndices, PrefetchOptions, PrefetchPipeline
from paragan.data.streaming import StreamingImages

POLL_S = 0.2  # how often one who waits looks around


class LaneLoader:
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
        images: np.ndarray | StreamingImages,
        labels: np.ndarray | None,
        *,
        local_lanes: tuple[int, ...],
        num_lanes: int,
        batch_size: int | Callable[[int], int],
        seed: int,
        start: int = 0,
        mirror: bool = False,
        lanes_per_pass: int = 0,
        stride_images: int = 0,
        device: torch.device = CPU,
        channels_last: bool = True,
        prefetch: PrefetchOptions | None = None,
        cores: int | None = None,
    ):
        self.images, self.labels, self.mirror = images, labels, mirror
        self.num_lanes, self.seed, self.device = num_lanes, seed, device
        self.batch_size: Callable[[int], int] = (
            (lambda position: batch_size) if isinstance(batch_size, int) else batch_size
        )
        size = lanes_per_pass or len(local_lanes)
        self.lane_groups = [local_lanes[i : i + size] for i in range(0, len(local_lanes), size)]
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.micro_batches: list[Batch] = []
        self._next_position, self._stride_images = start, stride_images
        self._prefetch, self._cores = prefetch, cores
        self.pipeline: PrefetchPipeline | None = None
        self._transfer: Transfer | None = None
        self._ready_batches: list[Tensor | None] = []  # of the next position
        self.while_waiting: Callable[[], object] = lambda: None  # called while `next` waits; may raise

    def next_micro_batches(self) -> list[Batch]:
        """The hands of the next position: one Batch a pass. Images in memory are gathered here and now: a thread that
        does it ahead costs more, by taking turns with this one, than they do. Others come from a pipeline."""
        while not self.wait(POLL_S):
            self.while_waiting()
        taken, self._ready_batches = self._ready_batches or [None] * len(self.lane_groups), []
        self.micro_batches = [
            self.make_micro_batch(self._next_position, lanes, images) for lanes, images in zip(self.lane_groups, taken)
        ]
        self._next_position = self._position_after(self._next_position)
        return self.micro_batches

    def wait(self, timeout_s: float) -> bool:
        """Wait until `next` need not, for each of its batches so long at most; whether it is so. Raises what went wrong
        with them."""
        ahead = self._get_transfer()
        while ahead and len(self._ready_batches) < len(self.lane_groups):
            if not ahead.wait(timeout_s):
                return False
            self._ready_batches.append(ahead.next_batch())
        return True

    def _position_after(self, position: int) -> int:
        return position + (self._stride_images or self.batch_size(position))

    def images_per_lane(self, position: int) -> int:
        """Images of a lane."""
        return self.batch_size(position) // self.num_lanes

    def num_buffered_positions(self) -> int:
        """For how many positions after the next one the pipeline has all batches."""
        if self.pipeline is None:
            return 0
        return self.pipeline.num_consecutive_ready() // len(self.lane_groups)

    def _get_transfer(self) -> Transfer | None:
        if self._transfer is None and isinstance(self.images, StreamingImages):
            pinned = backend_of(self.device).has_streams
            self.pipeline = PrefetchPipeline(
                self.images,
                self.iter_batch_indices(self._next_position),
                self._prefetch,
                pinned=pinned,
                cores=self._cores,
            )
            self._transfer = make_transfer(self.pipeline, self.device, self.memory_format)
        return self._transfer

    def make_micro_batch(self, position: int, lanes: tuple[int, ...], images: Tensor | None = None) -> Batch:
        """What these lanes see at this position. images : theirs, where they are here already."""
        order = self.batch_indices(position, lanes)
        images = self._gather(order) if images is None else images
        labels = None if self.labels is None else torch.from_numpy(self.labels[order.index]).to(self.device)
        return Batch(images, labels, LaneRng(self.seed, position, lanes, self.images_per_lane(position), self.device))

    def iter_batch_indices(self, position: int) -> Iterator[BatchIndices]:
        """Which images every pass holds, from a position on, without end."""
        while True:
            for lanes in self.lane_groups:
                yield self.batch_indices(position, lanes)
            position = self._position_after(position)

    def batch_indices(self, position: int, lanes: tuple[int, ...]) -> BatchIndices:
        """Which images these lanes see at this position, and which of them mirrored."""
        index = np.concatenate([self.lane_indices(position, lane) for lane in lanes])
        if not self.mirror:
            return BatchIndices(index)
        count = self.images_per_lane(position)
        flips = [philox_generator(self.seed, "mirror", lane, position).random(count) < 0.5 for lane in lanes]
        return BatchIndices(index, np.concatenate(flips))

    def lane_indices(self, position: int, lane: int) -> np.ndarray:
        """[per_lane] which images of the data a lane sees at a position."""
        count = self.images_per_lane(position)
        at = position + lane * count + np.arange(count)
        size = len(self.images)
        index = np.empty(count, np.int64)
        for epoch in range(at[0] // size, at[-1] // size + 1):
            inside = at // size == epoch
            index[inside] = epoch_permutation(self.seed, epoch, size)[at[inside] % size]
        return index

    def stats(self) -> dict[str, float]:
        """What a line of stats says of the pipeline; nothing where there is none."""
        return self.pipeline.stats() if self.pipeline else {}

    def pop_decisions(self) -> list[str]:
        """What its tuner changed since this was last asked for."""
        return self.pipeline.pop_decisions() if self.pipeline else []

    def close(self) -> None:
        """Let the pipeline go, if there is one."""
        if self.pipeline and self._transfer:
            self._transfer.close()  # first: it may be asking the pipeline for more
            self.pipeline.close()
        self.pipeline = self._transfer = None
        self._ready_batches = []

    def _gather(self, selection: BatchIndices) -> Tensor:
        """[N, C, H, W] float32 in [-1, 1] (of numbers: [N, ...] as they are) on the device, read on the spot."""
        pixels = self.images[selection.index]
        if selection.flip is not None:
            pixels[selection.flip] = pixels[selection.flip, :, ::-1]
        x = torch.from_numpy(pixels)
        x = x.pin_memory() if backend_of(self.device).has_streams else x
        return to_model_input(x.to(self.device, non_blocking=True), self.memory_format)
