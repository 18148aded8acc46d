"""A turn's passes, recorded once and replayed: on CUDA as a graph, which starts a thousand small kernels in one call;
on a CPU as a compiled program (game/program.py).

For games on one device, where nothing happens under backward. What a pass draws comes from the host, so it is drawn
ahead of a replay into the tensors that the recorded kernels read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from paragan.core.rng import LaneRng
from paragan.core.types import Batch, Loss

ReplayFn = Callable[[], Sequence[Tensor]]
CaptureFn = Callable[
    [ReplayFn], ReplayFn
]  # something to do -> that which does it. Nothing is computed before it is called
PassKindFn = Callable[[int], Hashable]  # step -> what tells passes of different kernels apart (lazy penalties)
WARMUP_PASSES = 3  # passes played before a CUDA graph is recorded: libraries choose their kernels


def capture_cuda_graph(action: ReplayFn) -> ReplayFn:
    """The kernels that it starts, on the memory that they had."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = action()

    def replay() -> Sequence[Tensor]:
        graph.replay()
        return made

    return replay


@contextlib.contextmanager
def side_stream() -> Generator[None]:
    """Inside, on CUDA, a stream other than the one that replays: autograd remembers where gradients were first added,
    and the default stream cannot be recorded."""
    if not torch.cuda.is_available():
        yield
        return
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield
    here.wait_stream(side)


@dataclass(frozen=True)
class StagedRng(LaneRng):
    """Random numbers that stay where they are: what was asked for once is drawn anew by `refresh`, in place."""

    streams: dict[tuple[Any, ...], tuple[Callable[[LaneRng], Tensor], Tensor]] = field(
        default_factory=dict[tuple[Any, ...], tuple[Callable[[LaneRng], Tensor], Tensor]]
    )

    def normal(self, stream: str, *shape: int) -> Tensor:
        return self._draw_staged(("normal", stream, shape), lambda draw: draw.normal(stream, *shape))

    def uniform(self, stream: str, *shape: int) -> Tensor:
        return self._draw_staged(("uniform", stream, shape), lambda draw: draw.uniform(stream, *shape))

    def choice(self, stream: str, values: np.ndarray) -> Tensor:
        return self._draw_staged(("choice", stream, id(values)), lambda draw: draw.choice(stream, values))

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
        """Draw what was asked for again, as `draw` does."""
        for of, tensor in self.streams.values():
            tensor.copy_(of(rng), non_blocking=True)


@dataclass
class CapturedPass:
    """One kind of pass: the hand it reads, and how it is replayed, once it has been recorded."""

    micro_batch: Batch
    rng: StagedRng
    num_passes: int = 0
    replay: ReplayFn | None = None
    part_names: Sequence[str] = ()  # of the loss, by name

    def copy_inputs(self, micro_batch: Batch) -> None:
        """Put what a hand holds where the recorded kernels look."""
        self.micro_batch.images.copy_(micro_batch.images, non_blocking=True)
        if self.micro_batch.labels is not None and micro_batch.labels is not None:
            self.micro_batch.labels.copy_(micro_batch.labels, non_blocking=True)
        self.rng.refresh(micro_batch.rng)


@dataclass
class GraphRecorder:
    """Plays the passes of one turn.

    kind    : which steps are computed alike; each kind is recorded once
    capture : how something is recorded
    warm    : passes that are played before
    built_s : seconds that recording took, so far
    """

    pass_kind: PassKindFn
    capture: CaptureFn = capture_cuda_graph
    warmup_passes: int = WARMUP_PASSES
    captured_passes: dict[Hashable, CapturedPass] = field(default_factory=dict[Hashable, CapturedPass])
    capture_s: float = 0.0

    def run(self, action: Callable[[Batch], Loss], micro_batch: Batch, step: int, weight: float) -> Loss:
        """What `action`, a pass forward and backward, does with a hand; gradients are added where they always are."""
        key = (self.pass_kind(step), tuple(micro_batch.images.shape), micro_batch.rng.per_lane, weight)
        if key not in self.captured_passes:
            draw = StagedRng(**{f.name: getattr(micro_batch.rng, f.name) for f in dataclasses.fields(LaneRng)})
            labels = None if micro_batch.labels is None else micro_batch.labels.clone()
            mine = dataclasses.replace(micro_batch, images=micro_batch.images.clone(), labels=labels, rng=draw)
            self.captured_passes[key] = CapturedPass(mine, draw)
        kept = self.captured_passes[key]
        kept.copy_inputs(micro_batch)
        kept.num_passes += 1
        if kept.num_passes <= self.warmup_passes:
            with side_stream():
                return action(kept.micro_batch)
        start, new = time.perf_counter(), kept.replay is None

        def run_action() -> Sequence[Tensor]:
            loss = action(kept.micro_batch)
            kept.part_names = tuple(loss.parts)
            return loss.total.detach(), *loss.parts.values()

        kept.replay = kept.replay or self.capture(run_action)
        total, *parts = (value.clone() for value in kept.replay())
        self.capture_s += time.perf_counter() - start if new else 0.0  # a program is compiled when it is first called
        return Loss(total, dict(zip(kept.part_names, parts)))
