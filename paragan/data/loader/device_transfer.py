"""Bring batches of the pipeline to the training device as model input, ahead of the step."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from paragan.core.devices import backend_of
from paragan.core.rng import CPU
from paragan.core.wav_files import INT16_SCALE
from paragan.data.loader.prefetch import PrefetchPipeline
from paragan.data.records.layout import RecordLayout
from paragan.data.records.streaming_records import StreamingRecords
from paragan.data.streaming import StreamingRows


class ModelInput(NamedTuple):
    """The data of a batch as networks get it.

    images : [N, C, H, W] float32 in [-1, 1], or [N, ...]: what D judges
    fields : all arrays of records of several arrays, by name; empty for others
    """

    images: Tensor
    fields: Mapping[str, Tensor]

    def to(self, device: torch.device) -> ModelInput:
        """Return the data on a device."""
        return ModelInput(self.images.to(device), {name: field.to(device) for name, field in self.fields.items()})


def to_model_input(pixels: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Convert pixels [N, H, W, C] uint8 to [N, C, H, W] float32 in [-1, 1], in `memory_format`.

    Numbers [N, ...] float32 keep their values.
    """
    if pixels.dtype == torch.float32:
        return pixels.contiguous(memory_format=memory_format) if pixels.dim() == 4 else pixels
    x = pixels.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
    # CUDA multiplies by the reciprocal of a Python number, which rounds otherwise: divide by a tensor
    return x.float().div_(torch.full((), 127.5, device=x.device)).sub_(1)


def records_to_model_input(rows: Tensor, layout: RecordLayout, memory_format: torch.memory_format) -> ModelInput:
    """Convert rows [N, bytes] uint8 of records to tensors, which share no memory with the rows.

    Images become [N, C, H, W] float32 in [-1, 1], int16 float32 in [-1, 1), float16 float32.
    """
    fields: dict[str, Tensor] = {}
    for field, offset in zip(layout.fields, layout.offsets):
        dtype = torch.from_numpy(np.empty(0, field.dtype)).dtype
        stored = rows[:, offset : offset + field.nbytes].view(dtype).reshape(len(rows), *field.shape)
        if field.is_image:
            fields[field.name] = to_model_input(stored, memory_format)
            continue
        values = stored.to(torch.float32, copy=True)
        fields[field.name] = values.div_(INT16_SCALE) if field.dtype == np.int16 else values
    return ModelInput(fields[layout.main], fields)


def read_model_input(data: np.ndarray | StreamingRows, rows: np.ndarray, device: torch.device = CPU) -> ModelInput:
    """Read records `rows` [N] of a data set now, as networks get them, varied by nothing but the records themselves."""
    if isinstance(data, StreamingRecords):
        stored = torch.from_numpy(data.read_rows(rows, data.evaluation_keys(rows)))
        return records_to_model_input(stored, data.layout, torch.contiguous_format).to(device)
    return ModelInput(to_model_input(torch.from_numpy(data[rows]).to(device), torch.contiguous_format), {})


class HostTransfer:
    """For devices without streams: a thread converts the next batch while the step computes, if it is ready."""

    def __init__(self, pipeline: PrefetchPipeline, memory_format: torch.memory_format, device: torch.device = CPU):
        self.pipeline = pipeline
        self.memory_format = memory_format
        self.device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="paragan data")
        self._next: Future[ModelInput] | None = None

    def next_batch(self) -> ModelInput:
        """Return the next batch."""
        batch = self._next.result() if self._next else self._convert_next()
        self._next = self._thread.submit(self._convert_next) if self.pipeline.is_ready else None
        return batch

    def wait(self, timeout_s: float) -> bool:
        """Block up to `timeout_s` until a batch is ready. Returns True if one is."""
        return self._next is not None or self.pipeline.wait(timeout_s)

    def close(self) -> None:
        """Wait for the thread."""
        self._thread.shutdown()

    def _convert_next(self) -> ModelInput:
        """Convert by NumPy, to the bits of `to_model_input`: one cache-friendly pass, and no threads of its own."""
        rows = self.pipeline.next_batch()
        if isinstance(self.pipeline.images, StreamingRecords):
            layout = self.pipeline.images.layout
            return records_to_model_input(torch.from_numpy(rows), layout, self.memory_format).to(self.device)
        x = np.divide(rows, np.float32(127.5))
        x -= np.float32(1)
        batch = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(memory_format=self.memory_format)
        return ModelInput(batch.to(self.device), {})


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

    def next_batch(self) -> ModelInput:
        """Return the next batch."""
        buffer = self._next or self._start_copy()
        compute_stream = self._module.current_stream(self.device)
        compute_stream.wait_event(buffer.copied)
        if isinstance(self.pipeline.images, StreamingRecords):
            batch = records_to_model_input(buffer.pixels, self.pipeline.images.layout, self.memory_format)
        else:
            images = to_model_input(buffer.pixels, self.memory_format)
            is_shared = images.data_ptr() == buffer.pixels.data_ptr()
            batch = ModelInput(images.clone() if is_shared else images, {})
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
