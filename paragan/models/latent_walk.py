"""Walks through the latent space: a closed loop through latents, over great circles, and labels that blend on the way.

frames = walk(model, stops=8, steps=30, seed=0, labels=[3, 7])     # uint8 [240, R, R, C], a loop
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.models.interpolation import sample_interpolated, slerp
from paragan.models.model import Model
from paragan.models.sampler import LatentSource, PerLabelSampler, Sampler


def walk(
    model: Model,
    stops: int,
    frames_per_stop: int,
    seed: int = 0,
    labels: Sequence[int | str] | None = None,
    truncation: float = 1.0,
) -> np.ndarray:
    """uint8 [stops * steps, R, R, C]: `steps` frames from each stop to the next, and from the last to the first.

    Stop i is sample i of `model.sample` with the same seed. Labels blend (their embeddings do); of a model with a
    generator for every label they change halfway.
    """
    sampler = model.sampler
    first = sampler if isinstance(sampler, Sampler) else sampler.for_label(0)
    if not isinstance(first.source, LatentSource) or model.spec.array_shape:
        raise UsageError(
            "a walk needs a generator that makes images of latents: this one is given data, or makes numbers"
        )
    z, y = first.source(range(stops), seed, truncation), model.labels(stops, labels, seed)
    frames: list[np.ndarray] = []
    for stop in range(stops):
        following = (stop + 1) % stops
        t = torch.arange(frames_per_stop) / frames_per_stop
        between = slerp(z[stop].expand(frames_per_stop, -1), z[following].expand(frames_per_stop, -1), t)
        pair = (0, 0) if y is None else (int(y[stop]), int(y[following]))
        frames.append(_render_segment(sampler, between, t, pair, conditional=y is not None))
    return np.concatenate(frames)


def _render_segment(
    sampler: Sampler | PerLabelSampler, z: Tensor, t: Tensor, label_pair: tuple[int, int], conditional: bool
) -> np.ndarray:
    if isinstance(sampler, PerLabelSampler):
        halves = zip(z.split(-(-len(z) // 2)), label_pair)
        made = [sample_interpolated(sampler.for_label(label), part, None) for part, label in halves]
    else:
        parts = zip(z.split(sampler.batch_size), t.split(sampler.batch_size))
        made = [sample_interpolated(sampler, part, label_pair if conditional else None, share) for part, share in parts]
    return torch.cat(made).permute(0, 2, 3, 1).numpy()
