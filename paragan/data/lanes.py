"""Lanes: which images each lane sees, as a function of (seed, lane, position).

A lane is a virtual data-parallel rank. Nothing about data is saved in checkpoints: the position says where to continue,
on any number of ranks. The batch size may be a function of the position (a growing batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from paragan.core.devices import backend_of
from paragan.core.host_copies import copy_to_device
from paragan.core.philox import epoch_permutation, philox_generator
from paragan.core.rng import CPU, LaneRng
from paragan.core.types import Batch
from paragan.data.loader.device_transfer import (
    ModelInput,
    Transfer,
    make_transfer,
    records_to_model_input,
    to_model_input,
)
from paragan.data.loader.prefetch import BatchIndices, PrefetchOptions, PrefetchPipeline
from paragan.data.records.streaming_records import StreamingRecords
from paragan.data.streaming import StreamingRows

POLL_S = 0.2  # between two calls of `while_waiting`


class LaneLoader:
    """The batches of a rank's lanes, position by position.

    The total batch at position p (in images) is images p .. p + batch_size(p) of an endless sequence of shuffled
    epochs; lane l takes its l-th part.

    while_waiting : is called again and again while `next_micro_batches` waits for data; may raise to stop it
    micro_batches : the last result of `next_micro_batches`

    Args:
        images: [N, H, W, C] uint8, in memory or streaming, numbers [N, ...] float32, or records of several arrays.
        labels: [N] int64, or None.
        local_lanes: the lanes of this rank.
        num_lanes: of all ranks.
        batch_size: of all lanes together; a number, or a function of the position.
        seed: of the run.
        start: first position.
        mirror: flip images from left to right at random.
        lanes_per_pass: lanes that share one pass of a network; 0 for all of this rank.
        stride_images: images from one position to the next; 0 for the batch size.
        device: where batches go.
        channels_last: memory format of the images.
        prefetch: options for streaming images.
        cores: CPU cores this rank may use to read streaming images.
    """

    def __init__(
        self,
        images: np.ndarray | StreamingRows,
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
        self.images = images
        self.labels = labels
        self.mirror = mirror
        self.num_lanes = num_lanes
        self.seed = seed
        self.device = device
        self.batch_size: Callable[[int], int] = (
            (lambda position: batch_size) if isinstance(batch_size, int) else batch_size
        )
        size = lanes_per_pass or len(local_lanes)
        self.lane_groups = [local_lanes[i : i + size] for i in range(0, len(local_lanes), size)]
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.micro_batches: list[Batch] = []
        self.while_waiting: Callable[[], object] = lambda: None
        self.pipeline: PrefetchPipeline | None = None
        self._transfer: Transfer | None = None
        self._ready_batches: list[ModelInput] = []  # of the next position
        self._next_position = start
        self._stride_images = stride_images
        self._prefetch = prefetch
        self._cores = cores

    def next_micro_batches(self) -> list[Batch]:
        """Return the micro-batches of the next position, one for each pass of a network.

        Images in memory are gathered here: a thread that gathered them ahead would slow this one down by more than that
        takes. Streaming images come from a pipeline.
        """
        while not self.wait(POLL_S):
            self.while_waiting()
        inputs = self._ready_batches or [None] * len(self.lane_groups)
        self._ready_batches = []
        self.micro_batches = [
            self.make_micro_batch(self._next_position, lanes, data) for lanes, data in zip(self.lane_groups, inputs)
        ]
        self._next_position = self._position_after(self._next_position)
        return self.micro_batches

    def reload(self, position: int) -> None:
        """Set `micro_batches` to those of an earlier position, which other ranks may have had."""
        self.micro_batches = [self.make_micro_batch(position, lanes) for lanes in self.lane_groups]

    def wait(self, timeout_s: float) -> bool:
        """Block, for each batch up to `timeout_s`, until the next position is ready. Returns True if it is.

        Raises:
            RunError: an image cannot be read, or too many are bad.
        """
        transfer = self._get_transfer()
        while transfer and len(self._ready_batches) < len(self.lane_groups):
            if not transfer.wait(timeout_s):
                return False
            self._ready_batches.append(transfer.next_batch())
        return True

    def _position_after(self, position: int) -> int:
        return position + (self._stride_images or self.batch_size(position))

    def images_per_lane(self, position: int) -> int:
        """Return the images of one lane at a position."""
        return self.batch_size(position) // self.num_lanes

    def num_buffered_positions(self) -> int:
        """Return for how many positions after the next one the pipeline has all batches."""
        if self.pipeline is None:
            return 0
        return self.pipeline.num_consecutive_ready() // len(self.lane_groups)

    def _get_transfer(self) -> Transfer | None:
        backend = backend_of(self.device)
        if self._transfer is None and isinstance(self.images, StreamingRows):
            self.pipeline = PrefetchPipeline(
                self.images,
                self.iter_batch_indices(self._next_position),
                self._prefetch,
                page_lock=backend.page_lock if backend.has_streams else None,
                cores=self._cores,
            )
            self._transfer = make_transfer(self.pipeline, self.device, self.memory_format)
        return self._transfer

    def make_micro_batch(self, position: int, lanes: tuple[int, ...], data: ModelInput | None = None) -> Batch:
        """Return the batch of some lanes at a position.

        Args:
            position: in images.
            lanes: the lanes.
            data: their images or records, if they have been read.
        """
        selection = self.batch_indices(position, lanes)
        data = data or self._gather(selection)
        labels = None
        if self.labels is not None:
            labels = copy_to_device(torch.from_numpy(self.labels[selection.index]), self.device)
        rng = LaneRng(self.seed, position, lanes, self.images_per_lane(position), self.device)
        return Batch(data.images, labels, rng, fields=data.fields)

    def iter_batch_indices(self, position: int) -> Iterator[BatchIndices]:
        """Yield the images of every pass from a position on, without end."""
        while True:
            for lanes in self.lane_groups:
                yield self.batch_indices(position, lanes)
            position = self._position_after(position)

    def batch_indices(self, position: int, lanes: tuple[int, ...]) -> BatchIndices:
        """Return which images some lanes see at a position, and how they are varied."""
        index = np.concatenate([self.lane_indices(position, lane) for lane in lanes])
        count = self.images_per_lane(position)
        if isinstance(self.images, StreamingRecords):
            return BatchIndices(
                index, keys=[(self.seed, lane, position, row) for lane in lanes for row in range(count)]
            )
        if not self.mirror:
            return BatchIndices(index)
        flips = [philox_generator(self.seed, "mirror", lane, position).random(count) < 0.5 for lane in lanes]
        return BatchIndices(index, np.concatenate(flips))

    def lane_indices(self, position: int, lane: int) -> np.ndarray:
        """Return the indices [images_per_lane] of the images that a lane sees at a position."""
        count = self.images_per_lane(position)
        sequence = position + lane * count + np.arange(count)  # positions in the endless sequence of epochs
        size = len(self.images)
        index = np.empty(count, np.int64)
        for epoch in range(sequence[0] // size, sequence[-1] // size + 1):
            in_epoch = sequence // size == epoch
            index[in_epoch] = epoch_permutation(self.seed, epoch, size)[sequence[in_epoch] % size]
        return index

    def stats(self) -> dict[str, float]:
        """Return the keys of the pipeline for a line of stats.jsonl; none if images are in memory."""
        return self.pipeline.stats() if self.pipeline else {}

    def pop_decisions(self) -> list[str]:
        """Return and clear the lines about decisions of the pipeline's tuner."""
        return self.pipeline.pop_decisions() if self.pipeline else []

    def close(self) -> None:
        """Stop the pipeline, if there is one."""
        if self.pipeline and self._transfer:
            self._transfer.close()  # first: it may be taking a batch from the pipeline
            self.pipeline.close()
        self.pipeline = None
        self._transfer = None
        self._ready_batches = []

    def _gather(self, selection: BatchIndices) -> ModelInput:
        """Read images or records now, on the device."""
        if isinstance(self.images, StreamingRecords):
            variations = selection.variations(slice(None))
            rows = torch.from_numpy(self.images.read_rows(selection.index, variations))
            return records_to_model_input(copy_to_device(rows, self.device), self.images.layout, self.memory_format)
        pixels = self.images[selection.index]
        if selection.flip is not None:
            pixels[selection.flip] = pixels[selection.flip, :, ::-1]
        images = to_model_input(copy_to_device(torch.from_numpy(pixels), self.device), self.memory_format)
        return ModelInput(images, {})
