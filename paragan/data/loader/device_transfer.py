"""Batches as a network takes them, on the device that trains, made before they are needed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paragan.core.devices import backend_of
from paragan.core.rng import CPU
from paragan.data.loader.prefetch import PrefetchPipeline


def to_model_input(pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """[N, H, W, C] uint8 -> [N, C, H, W] float32 in [-1, 1], in this layout. What is float32 stays as it is."""
    if pixels.dtype == torch.float32:
        return pixels.contiguous(memory_format=memory_format) if pixels.dim() == 4 else pixels
    x = pixels.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    return x.float().div_(127.5).sub_(1)


class HostTransfer:
    """Without streams: a thread makes the next batch while the step computes, if the pipeline has it then."""

    def __init__(self, pipeline: PrefetchPipeline, memory_format: torch.memory_format, device: torch.device = CPU):
        self.pipeline, self.memory_format, self.device = pipeline, memory_format, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paragan data")
        self._next: Future[Tensor] | None = None

    def next_batch(self) -> Tensor:
        """The next batch, [N, C, R, R] float32 in [-1, 1]."""
        now = self._next.result() if self._next else self._convert_next()
        self._next = self._thread.submit(self._convert_next) if self.pipeline.is_ready else None
        return now

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` need not, so long at most; whether it is so."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        self._thread.shutdown()

    def _convert_next(self) -> Tensor:
        """The bits of `floats`, by NumPy: one pass in blocks that stay in the cache, and no threads of its own."""
        x = np.divide(self.pipeline.next_batch(), np.float32(127.5))
        x -= np.float32(1)
        made = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        return made.to(self.device)


@dataclass(frozen=True)
class _PendingCopy:
    pixels: Tensor
    done: torch.cuda.Event


class CudaTransfer:
    """For a CUDA device: a stream of its own copies the next batch while the step computes with this one."""

    def __init__(self, pipeline: PrefetchPipeline, memory_format: torch.memory_format, device: torch.device):
        self.pipeline, self.memory_format, self.device = pipeline, memory_format, device
        self._stream = torch.cuda.Stream(device)
        self._next: _PendingCopy | None = None
        self._last: _PendingCopy | None = None

    def next_batch(self) -> Tensor:
        """The next batch, [N, C, R, R] float32 in [-1, 1]."""
        now, here = self._next or self._start_copy(), torch.cuda.current_stream(self.device)
        here.wait_event(now.done)
        now.pixels.record_stream(here)
        self._next = self._start_copy() if self.pipeline.is_ready else None
        return to_model_input(now.pixels, self.memory_format)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` need not, so long at most; whether it is so."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        if self._last:
            self._last.done.synchronize()

    def _start_copy(self) -> _PendingCopy:
        if self._last:
            self._last.done.synchronize()  # its memory is the pipeline's again from the next line on
        pixels, done = torch.from_numpy(self.pipeline.next_batch()), torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._last = _PendingCopy(pixels.to(self.device, non_blocking=True), done)
            done.record(self._stream)
        return self._last


Transfer = HostTransfer | CudaTransfer


def make_transfer(pipeline: PrefetchPipeline, device: torch.device, memory_format: torch.memory_format) -> Transfer:
    """The one for a device."""
    kind = CudaTransfer if backend_of(device).has_streams else HostTransfer
    return kind(pipeline, memory_format, device)
