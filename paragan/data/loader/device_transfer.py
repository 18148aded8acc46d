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


@dataclass(frozen=True)
class _PendingCopy:
    pixels: Tensor
    done: Any  # an event


class StreamTransfer:
    """For devices with streams: a side stream copies the next batch while the step computes."""

    def __init__(self, pipeline: PrefetchPipeline, memory_format: torch.memory_format, device: torch.device):
        self.pipeline = pipeline
        self.memory_format = memory_format
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._next: _PendingCopy | None = None
        self._last: _PendingCopy | None = None

    def next_batch(self) -> Tensor:
        """Return the next batch, [N, C, H, W] float32 in [-1, 1]."""
        copy = self._next or self._start_copy()
        self._module.current_stream(self.device).wait_event(copy.done)
        batch = to_model_input(copy.pixels, self.memory_format)
        self._next = self._start_copy() if self.pipeline.is_ready else None
        return batch

    def wait(self, timeout_s: float) -> bool:
        """Block up to `timeout_s` until a batch is ready. Returns True if one is."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        """Wait for the last copy."""
        if self._last:
            self._last.done.synchronize()

    def _start_copy(self) -> _PendingCopy:
        if self._last:
            self._last.done.synchronize()  # the next line gives its memory back to the pipeline
        pixels = torch.from_numpy(self.pipeline.next_batch())
        done = self._module.Event()
        self._stream.wait_stream(self._module.current_stream(self.device))  # which may still read the memory it gets
        with self._module.stream(self._stream):
            self._last = _PendingCopy(pixels.to(self.device, non_blocking=True), done)
            done.record(self._stream)
        return self._last


Transfer = HostTransfer | StreamTransfer


def make_transfer(pipeline: PrefetchPipeline, device: torch.device, memory_format: torch.memory_format) -> Transfer:
    """Return the transfer for a device."""
    transfer_class = StreamTransfer if backend_of(device).has_streams else HostTransfer
    return transfer_class(pipeline, memory_format, device)
