"""Capture the passes of a turn once and replay them: on CUDA as a graph, which launches all kernels in one call; on a
CPU as a compiled program (compiled_pass.py).

For games on one device, where nothing is sent during backward. Random numbers come from the host, so they are drawn
before a replay, into the tensors that the captured kernels read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from paragan.core.rng import LaneRng
from paragan.core.types import Batch, Loss

ReplayFn = Callable[[], Sequence[Tensor]]
CaptureFn = Callable[[ReplayFn], ReplayFn]  # a pass -> its replay, which computes nothing before it is called
PassKindFn = Callable[[int], Hashable]  # step -> a key for passes that run the same kernels (lazy penalties)
WARMUP_PASSES = 3  # passes before a CUDA graph is captured, in which libraries choose their kernels


def capture_cuda_graph(action: ReplayFn) -> ReplayFn:
    """Capture the kernels of `action`. A replay runs them on the same memory."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=_capture_stream(torch.cuda.current_device())):
        outputs = action()

    def replay() -> Sequence[Tensor]:
        graph.replay()
        return outputs

    return replay


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of a device on which passes are warmed up and captured.

    Always the same: autograd remembers the stream on which gradients were first added.
    """
    return torch.cuda.Stream(device)


@contextlib.contextmanager
def side_stream() -> Generator[None]:
    """Use the stream of captures inside this context: the default stream cannot be captured."""
    if not torch.cuda.is_available():
        yield
        return
    current = torch.cuda.current_stream()
    side = _capture_stream(torch.cuda.current_device())
    side.wait_stream(current)
    with torch.cuda.stream(side):
        yield
    current.wait_stream(side)


@dataclass(frozen=True)
class StagedRng(LaneRng):
    """Random numbers in tensors that stay in place: `refresh` draws all of them again."""

    streams: dict[tuple[Any, ...], tuple[Callable[[LaneRng], Tensor], Tensor]] = field(
        default_factory=dict[tuple[Any, ...], tuple[Callable[[LaneRng], Tensor], Tensor]]
    )

    def normal(self, stream: str, *shape: int) -> Tensor:
        return self._draw_staged(("normal", stream, shape), lambda rng: rng.normal(stream, *shape))

    def uniform(self, stream: str, *shape: int) -> Tensor:
        return self._draw_staged(("uniform", stream, shape), lambda rng: rng.uniform(stream, *shape))

    def choice(self, stream: str, values: np.ndarray) -> Tensor:
        return self._draw_staged(("choice", stream, id(values)), lambda rng: rng.choice(stream, values))

    def _draw_staged(self, key: tuple[Any, ...], draw_fn: Callable[[LaneRng], Tensor]) -> Tensor:
        key = (*key, self.per_lane)  # G's batch may be another than D's
        if key not in self.streams:
            size = self.per_lane

            def sample(rng: LaneRng) -> Tensor:
                return draw_fn(dataclasses.replace(rng, per_lane=size))

            with _disable_current_modes():  # drawn, and not traced
                self.streams[key] = sample, sample(LaneRng(self.seed, self.position, self.lanes, size, self.device))
        return self.streams[key][1]

    def refresh(self, rng: LaneRng) -> None:
        """Draw all numbers again, at the position of `rng`."""
        for sample, tensor in self.streams.values():
            tensor.copy_(sample(rng), non_blocking=True)


@dataclass
class CapturedPass:
    """One kind of pass: the micro-batch that it reads, and its replay once it is captured."""

    micro_batch: Batch
    rng: StagedRng
    num_passes: int = 0
    replay: ReplayFn | None = None
    part_names: Sequence[str] = ()  # of the loss, by name

    def copy_inputs(self, micro_batch: Batch) -> None:
        """Copy a micro-batch to where the captured kernels read, and draw its random numbers."""
        self.micro_batch.images.copy_(micro_batch.images, non_blocking=True)
        if self.micro_batch.labels is not None and micro_batch.labels is not None:
            self.micro_batch.labels.copy_(micro_batch.labels, non_blocking=True)
        for name, values in self.micro_batch.fields.items():
            values.copy_(micro_batch.fields[name], non_blocking=True)
        self.rng.refresh(micro_batch.rng)


@dataclass
class GraphRecorder:
    """Captures and replays the passes of one turn.

    pass_kind       : a key for steps that run the same kernels; each kind is captured once
    capture         : captures a pass
    warmup_passes   : passes that run before a capture
    captured_passes : what was captured so far
    capture_s       : seconds that captures took so far
    """

    pass_kind: PassKindFn
    capture: CaptureFn = capture_cuda_graph
    warmup_passes: int = WARMUP_PASSES
    captured_passes: dict[Hashable, CapturedPass] = field(default_factory=dict[Hashable, CapturedPass])
    capture_s: float = 0.0

    def run(self, action: Callable[[Batch], Loss], micro_batch: Batch, step: int, weight: float) -> Loss:
        """Run `action`, forward and backward of a pass, or replay it. Gradients accumulate in place."""
        key = (self.pass_kind(step), tuple(micro_batch.images.shape), micro_batch.rng.per_lane, weight)
        if key not in self.captured_passes:
            rng = StagedRng(**{f.name: getattr(micro_batch.rng, f.name) for f in dataclasses.fields(LaneRng)})
            labels = None if micro_batch.labels is None else micro_batch.labels.clone()
            fields = {name: values.clone() for name, values in micro_batch.fields.items()}
            images = micro_batch.images.clone()
            staged = dataclasses.replace(micro_batch, images=images, labels=labels, rng=rng, fields=fields)
            self.captured_passes[key] = CapturedPass(staged, rng)
        captured = self.captured_passes[key]
        captured.copy_inputs(micro_batch)
        captured.num_passes += 1
        if captured.num_passes <= self.warmup_passes:
            with side_stream():
                return action(captured.micro_batch)
        start = time.perf_counter()
        is_new = captured.replay is None

        def run_action() -> Sequence[Tensor]:
            loss = action(captured.micro_batch)
            captured.part_names = tuple(loss.parts)
            return loss.total.detach(), *loss.parts.values()

        captured.replay = captured.replay or self.capture(run_action)
        total, *parts = (value.clone() for value in captured.replay())
        if is_new:  # a program is compiled in its first call
            self.capture_s += time.perf_counter() - start
        return Loss(total, dict(zip(captured.part_names, parts)))
