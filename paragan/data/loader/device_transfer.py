"""Bring batches of the pipeline to the training device as model input, ahead of the step."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paragan.core.devices import backend_of
from paragan.core.rng import CPU
from paragan.data.loader.prefetch import PrefetchPipeline


def to_model_input(pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Convert pixels [N, H, W, C] uint8 to [N, C, H, W] float32 in [-1, 1], in `memory_format`.

    Numbers [N, ...] float32 keep their values.
    """
    if pixels.dtype == torch.float32:
        return pixels.contiguous(memory_format=memory_format) if pixels.dim() == 4 else pixels
    x = pixels.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    return x.float().div_(127.5).sub_(1)


class HostTransfer:
    """For devices without streams: a thread converts the next batch while the step computes, if it is ready."""

    def __init__(self, pipeline: PrefetchPipeline, memory_format: torch.memory_format, device: torch.device = CPU):
        self.pipeline = pipeline
        self.memory_format = memory_format
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paragan data")
        self._next: Future[Tensor] | None = None

    def next_batch(self) -> Tensor:
        """Return the next batch, [N, C, H, W] float32 in [-1, 1]."""
        batch = self._next.result() if self._next else self._convert_next()
        self._next = self._thread.submit(self._convert_next) if self.pipeline.is_ready else None
        return batch

    def wait(self, timeout_s: float) -> bool:
        """Block up to `timeout_s` until a batch is ready. Returns True if one is."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()

    def _convert_next(self) -> Tensor:
        """Convert by NumPy, to the bits of `to_model_input`: one cache-friendly pass, and no threads of its own."""
        x = np.divide(self.pipeline.next_batch(), np.float32(127.5))
        x -= np.float32(1)
        batch = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        return batch.to(self.device)


@dataclass
class _Buffer:
    """Memory of the device that receives every other batch.

    pixels    : what was copied
    copied    : the event after the copy
    converted : the event after it was read
    """

    pixels: Tensor
    copied: Any
    converted: Any = None


class StreamTransfer:
    """For devices with streams: a side stream copies the next batch while the step computes.

    The copy waits for the step before last, which has read its memory, and for nothing else.
    """

    def __init__(self, pipeline: PrefetchPipeline, memory_format: torch.memory_format, device: torch.device):
        self.pipeline = pipeline
        self.memory_format = memory_format
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._buffers: dict[tuple[torch.Size, int], _Buffer] = {}  # by shape and parity of the batch
        self._num_copies = 0
        self._next: _Buffer | None = None
        self._last_copied: Any = None

    def next_batch(self) -> Tensor:
        """Return the next batch, [N, C, H, W] float32 in [-1, 1]."""
        buffer = self._next or self._start_copy()
        compute_stream = self._module.current_stream(self.device)
        compute_stream.wait_event(buffer.copied)
        batch = to_model_input(buffer.pixels, self.memory_format)
        if batch.data_ptr() == buffer.pixels.data_ptr():
            batch = batch.clone()
        buffer.converted = compute_stream.record_event()
        self._next = self._start_copy() if self.pipeline.is_ready else None
        return batch

    def wait(self, timeout_s: float) -> bool:
        """Block up to `timeout_s` until a batch is ready. Returns True if one is."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        """Wait for the last copy."""
        if self._last_copied:
            self._last_copied.synchronize()

    def _start_copy(self) -> _Buffer:
        if self._last_copied:
            self._last_copied.synchronize()  # the next line gives its memory on the host back to the pipeline
        pixels = torch.from_numpy(self.pipeline.next_batch())
        key = pixels.shape, self._num_copies % 2
        self._num_copies += 1
        if key not in self._buffers:
            self._buffers[key] = _Buffer(torch.empty_like(pixels, device=self.device), self._module.Event())
            self._stream.wait_stream(self._module.current_stream(self.device))  # which may have used that memory before
        buffer = self._buffers[key]
        if buffer.converted:
            self._stream.wait_event(buffer.converted)
        with self._module.stream(self._stream):
            buffer.pixels.copy_(pixels, non_blocking=True)
            buffer.copied.record(self._stream)
        self._last_copied = buffer.copied
        return buffer


Transfer = HostTransfer | StreamTransfer


def make_transfer(pipeline: PrefetchPipeline, device: torch.device, memory_format: torch.memory_format) -> Transfer:
    """Return the transfer for a device."""
    transfer_class = StreamTransfer if backend_of(device).has_streams else HostTransfer
    return transfer_class(pipeline, memory_format, device)
