"""Batches on the device that trains, copied there before they are needed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paragan.data.pipeline import Pipeline


@dataclass(frozen=True)
class _Copy:
    pixels: Tensor
    done: torch.cuda.Event


class Upload:
    """What a pipeline makes, as tensors on a device.

    On CUDA a stream of its own copies the next batch while the step computes with this one. On a CPU the pipeline's
    memory is what is given, until the next call.
    """

    def __init__(self, pipeline: Pipeline, device: torch.device):
        self.pipeline, self.device = pipeline, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: _Copy | None = None
        self._last: _Copy | None = None

    def take(self) -> Tensor:
        """The next batch, [N, R, R, C] uint8."""
        if self._stream is None:
            return torch.from_numpy(self.pipeline.take())
        now, here = self._next or self._copy(self._stream), torch.cuda.current_stream(self.device)
        here.wait_event(now.done)
        now.pixels.record_stream(here)
        self._next = self._copy(self._stream) if self.pipeline.ready else None
        return now.pixels

    def _copy(self, stream: torch.cuda.Stream) -> _Copy:
        if self._last:
            self._last.done.synchronize()  # its memory is the pipeline's again from the next line on
        pixels, done = torch.from_numpy(self.pipeline.take()), torch.cuda.Event()
        with torch.cuda.stream(stream):
            self._last = _Copy(pixels.to(self.device, non_blocking=True), done)
            done.record(stream)
        return self._last
