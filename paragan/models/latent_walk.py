"""Walks through the latent space: a closed loop through samples, with interpolated latents and labels.

frames = walk(model, stops=8, frames_per_stop=30, seed=0, labels=[3, 7])     # uint8 [240, H, W, C], a loop
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.models.interpolation import sample_interpolated, slerp
from paragan.models.model import Model
from paragan.models.sampler import PerLabelSampler, Sampler
from paragan.models.style_space import walk_styles


def walk(
    model: Model,
    stops: int,
    frames_per_stop: int,
    seed: int = 0,
    labels: Sequence[int | str] | None = None,
    truncation: float = 1.0,
) -> np.ndarray:
    """Return the frames of a loop through `stops` samples, uint8 [stops * frames_per_stop, H, W, C].

    Stop i is sample i of `model.sample` with the same seed. Label embeddings are interpolated; a per-label model
    changes the generator halfway between two stops. Of a model with styles, styles are interpolated (style_space.py).

    Raises:
        UsageError: the generator takes data, or makes numbers.
    """
    sampler = model.sampler
    first = sampler.for_label(0) if isinstance(sampler, PerLabelSampler) else sampler
    if not first.uses_latents or model.spec.array_shape:
        raise UsageError("walk: needs a model that makes images from latents, not from data, and not numbers")
    y = model.labels(stops, labels, seed)
    if isinstance(sampler, Sampler) and sampler.has_styles:
        latents = sampler.source(range(stops), seed, 1.0)
        return walk_styles(sampler, latents, y, frames_per_stop, truncation).permute(0, 2, 3, 1).numpy()
    z = first.source(range(stops), seed, truncation)
    t = torch.arange(frames_per_stop) / frames_per_stop
    frames: list[np.ndarray] = []
    for stop in range(stops):
        next_stop = (stop + 1) % stops
        latents = slerp(z[stop].expand(frames_per_stop, -1), z[next_stop].expand(frames_per_stop, -1), t)
        label_pair = None if y is None else (int(y[stop]), int(y[next_stop]))
        frames.append(_render_segment(sampler, latents, t, label_pair))
    return np.concatenate(frames)


def _render_segment(
    sampler: Sampler | PerLabelSampler, z: Tensor, t: Tensor, label_pair: tuple[int, int] | None
) -> np.ndarray:
    """Return the frames from one stop to the next, uint8 [N, H, W, C]."""
    images: list[Tensor] = []
    if isinstance(sampler, PerLabelSampler):
        assert label_pair is not None
        for half, label in zip(z.split(-(-len(z) // 2)), label_pair):
            images.append(sample_interpolated(sampler.for_label(label), half, None))
    else:
        for latents, weights in zip(z.split(sampler.batch_size), t.split(sampler.batch_size)):
            images.append(sample_interpolated(sampler, latents, label_pair, weights))
    return torch.cat(images).permute(0, 2, 3, 1).numpy()
