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

from paragan.core.rng import Draw
from paragan.core.types import Batch, Loss

Replay = Callable[[], Sequence[Tensor]]
Capture = Callable[[Replay], Replay]  # something to do -> that which does it. Nothing is computed before it is called
Kind = Callable[[int], Hashable]  # step -> what tells passes of different kernels apart (lazy penalties)
WARM = 3  # passes played before a CUDA graph is recorded: libraries choose their kernels


def cuda_graph(action: Replay) -> Replay:
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
class Staged(Draw):
    """Random numbers that stay where they are: what was asked for once is drawn anew by `refresh`, in place."""

    asked: dict[tuple[Any, ...], tuple[Callable[[Draw], Tensor], Tensor]] = field(
        default_factory=dict[tuple[Any, ...], tuple[Callable[[Draw], Tensor], Tensor]]
    )

    def normal(self, stream: str, *shape: int) -> Tensor:
        return self._kept(("normal", stream, shape), lambda draw: draw.normal(stream, *shape))

    def uniform(self, stream: str, *shape: int) -> Tensor:
        return self._kept(("uniform", stream, shape), lambda draw: draw.uniform(stream, *shape))

    def choice(self, stream: str, values: np.ndarray) -> Tensor:
        return self._kept(("choice", stream, id(values)), lambda draw: draw.choice(stream, values))

    def _kept(self, key: tuple[Any, ...], drawn: Callable[[Draw], Tensor]) -> Tensor:
        key = (*key, self.per_lane)  # G's batch may be another than D's
        if key not in self.asked:
            size = self.per_lane

            def of(draw: Draw) -> Tensor:
                return drawn(dataclasses.replace(draw, per_lane=size))

            with _disable_current_modes():  # drawn, and not traced
                self.asked[key] = of, of(Draw(self.seed, self.position, self.lanes, size, self.device))
        return self.asked[key][1]

    def refresh(self, draw: Draw) -> None:
        """Draw what was asked for again, as `draw` does."""
        for of, tensor in self.asked.values():
            tensor.copy_(of(draw), non_blocking=True)


@dataclass
class Recording:
    """One kind of pass: the hand it reads, and how it is replayed, once it has been recorded."""

    hand: Batch
    draw: Staged
    passes: int = 0
    replay: Replay | None = None
    parts: Sequence[str] = ()  # of the loss, by name

    def read(self, hand: Batch) -> None:
        """Put what a hand holds where the recorded kernels look."""
        self.hand.images.copy_(hand.images, non_blocking=True)
        if self.hand.labels is not None and hand.labels is not None:
            self.hand.labels.copy_(hand.labels, non_blocking=True)
        self.draw.refresh(hand.draw)


@dataclass
class Recorder:
    """Plays the passes of one turn.

    kind    : which steps are computed alike; each kind is recorded once
    capture : how something is recorded
    warm    : passes that are played before
    built_s : seconds that recording took, so far
    """

    kind: Kind
    capture: Capture = cuda_graph
    warm: int = WARM
    recordings: dict[Hashable, Recording] = field(default_factory=dict[Hashable, Recording])
    built_s: float = 0.0

    def play(self, action: Callable[[Batch], Loss], hand: Batch, step: int, weight: float) -> Loss:
        """What `action`, a pass forward and backward, does with a hand; gradients are added where they always are."""
        key = (self.kind(step), tuple(hand.images.shape), hand.draw.per_lane, weight)
        if key not in self.recordings:
            draw = Staged(**{f.name: getattr(hand.draw, f.name) for f in dataclasses.fields(Draw)})
            labels = None if hand.labels is None else hand.labels.clone()
            mine = dataclasses.replace(hand, images=hand.images.clone(), labels=labels, draw=draw)
            self.recordings[key] = Recording(mine, draw)
        kept = self.recordings[key]
        kept.read(hand)
        kept.passes += 1
        if kept.passes <= self.warm:
            with side_stream():
                return action(kept.hand)
        start, new = time.perf_counter(), kept.replay is None

        def recorded() -> Sequence[Tensor]:
            loss = action(kept.hand)
            kept.parts = tuple(loss.parts)
            return loss.total.detach(), *loss.parts.values()

        kept.replay = kept.replay or self.capture(recorded)
        total, *parts = (value.clone() for value in kept.replay())
        self.built_s += time.perf_counter() - start if new else 0.0  # a program is compiled when it is first called
        return Loss(total, dict(zip(kept.parts, parts)))
