"""Batches as a network takes them, on the device that trains, made before they are needed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paragan.core.devices import kind_of
from paragan.core.rng import CPU
from paragan.data.loader.prefetch import Pipeline


def floats(pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """[N, H, W, C] uint8 -> [N, C, H, W] float32 in [-1, 1], in this layout. What is float32 stays as it is."""
    if pixels.dtype == torch.float32:
        return pixels.contiguous(memory_format=memory_format) if pixels.dim() == 4 else pixels
    x = pixels.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    return x.float().div_(127.5).sub_(1)


class OnHost:
    """Without streams: a thread makes the next batch while the step computes, if the pipeline has it then."""

    def __init__(self, pipeline: Pipeline, memory_format: torch.memory_format, device: torch.device = CPU):
        self.pipeline, self.memory_format, self.device = pipeline, memory_format, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paragan data")
        self._next: Future[Tensor] | None = None

    def take(self) -> Tensor:
        """The next batch, [N, C, R, R] float32 in [-1, 1]."""
        now = self._next.result() if self._next else self._made()
        self._next = self._thread.submit(self._made) if self.pipeline.ready else None
        return now

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` need not, so long at most; whether it is so."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        self._thread.shutdown()

    def _made(self) -> Tensor:
        """The bits of `floats`, by NumPy: one pass in blocks that stay in the cache, and no threads of its own."""
        x = np.divide(self.pipeline.take(), np.float32(127.5))
        x -= np.float32(1)
        made = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        return made.to(self.device)


@dataclass(frozen=True)
class _Copy:
    pixels: Tensor
    done: torch.cuda.Event


class OnCuda:
    """For a CUDA device: a stream of its own copies the next batch while the step computes with this one."""

    def __init__(self, pipeline: Pipeline, memory_format: torch.memory_format, device: torch.device):
        self.pipeline, self.memory_format, self.device = pipeline, memory_format, device
        self._stream = torch.cuda.Stream(device)
        self._next: _Copy | None = None
        self._last: _Copy | None = None

    def take(self) -> Tensor:
        """The next batch, [N, C, R, R] float32 in [-1, 1]."""
        now, here = self._next or self._copy(), torch.cuda.current_stream(self.device)
        here.wait_event(now.done)
        now.pixels.record_stream(here)
        self._next = self._copy() if self.pipeline.ready else None
        return floats(now.pixels, self.memory_format)

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` need not, so long at most; whether it is so."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        if self._last:
            self._last.done.synchronize()

    def _copy(self) -> _Copy:
        if self._last:
            self._last.done.synchronize()  # its memory is the pipeline's again from the next line on
        pixels, done = torch.from_numpy(self.pipeline.take()), torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            self._last = _Copy(pixels.to(self.device, non_blocking=True), done)
            done.record(self._stream)
        return self._last


Upload = OnHost | OnCuda


def upload(pipeline: Pipeline, device: torch.device, memory_format: torch.memory_format) -> Upload:
    """The one for a device."""
    kind = OnCuda if kind_of(device).streams else OnHost
    return kind(pipeline, memory_format, device)
