"""Walks through the latent space: a closed loop through latents, over great circles, and labels that blend on the way.

frames = walk(model, stops=8, steps=30, seed=0, labels=[3, 7])     # uint8 [240, R, R, C], a loop
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import Unusable
from ..train.model import Model
from ..train.sampler import Latents, Merged, Sampler


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Rows between those of a and b [N, latent], t [N] from 0 to 1: over the great circle, lengths in proportion.

    Shoemake 1985, eq. 2; on directions, since normal numbers in many dimensions lie next to a sphere.
    """
    lengths = torch.stack([a.norm(dim=1), b.norm(dim=1)])
    angle = torch.acos(((a * b).sum(1) / lengths.prod(0)).clamp(-1, 1))[:, None]
    t = t[:, None]
    straight = angle < 1e-4
    whole = torch.where(straight, torch.ones_like(angle), torch.sin(angle))
    shares = [torch.where(straight, s, torch.sin(s * angle) / whole) for s in (1 - t, t)]
    way = shares[0] * a / lengths[0, :, None] + shares[1] * b / lengths[1, :, None]
    return way * (lengths[0, :, None] * (1 - t) + lengths[1, :, None] * t)


def walk(
    model: Model,
    stops: int,
    steps: int,
    seed: int = 0,
    labels: Sequence[int | str] | None = None,
    truncation: float = 1.0,
) -> np.ndarray:
    """uint8 [stops * steps, R, R, C]: `steps` frames from each stop to the next, and from the last to the first.

    Stop i is sample i of `model.sample` with the same seed. Labels blend (their embeddings do); of a model with a
    generator for every label they change halfway.
    """
    sampler = model.sampler
    first = sampler if isinstance(sampler, Sampler) else sampler.of(0)
    if not isinstance(first.source, Latents) or model.spec.values:
        raise Unusable(
            "a walk needs a generator that makes images of latents: this one is given data, or makes numbers"
        )
    z, y = first.source(range(stops), seed, truncation), model.labels(stops, labels, seed)
    frames: list[np.ndarray] = []
    for stop in range(stops):
        following = (stop + 1) % stops
        t = torch.arange(steps) / steps
        between = slerp(z[stop].expand(steps, -1), z[following].expand(steps, -1), t)
        pair = (0, 0) if y is None else (int(y[stop]), int(y[following]))
        frames.append(_frames(sampler, between, t, pair, conditional=y is not None))
    return np.concatenate(frames)


def _frames(sampler: Sampler | Merged, z: Tensor, t: Tensor, pair: tuple[int, int], conditional: bool) -> np.ndarray:
    if isinstance(sampler, Merged):
        halves = zip(z.split(-(-len(z) // 2)), pair)
        made = [made_of(sampler.of(label), part, None) for part, label in halves]
    else:
        parts = zip(z.split(sampler.batch), t.split(sampler.batch))
        made = [made_of(sampler, part, pair if conditional else None, share) for part, share in parts]
    return torch.cat(made).permute(0, 2, 3, 1).numpy()


@torch.no_grad()
def made_of(sampler: Sampler, z: Tensor, pair: tuple[int, int] | None, share: Tensor | float = 0.0) -> Tensor:
    """Images [N, C, R, R] uint8 of latents, each of a blend of two labels: `share` of the second."""
    z = z.to(sampler.device)
    if pair is None:
        return sampler.finish(sampler.g(z, None)).cpu()
    a, b = (torch.full((len(z),), label, device=sampler.device) for label in pair)
    if pair[0] == pair[1]:
        return sampler.finish(sampler.g(z, a)).cpu()
    with blended(sampler.g, b, torch.as_tensor(share, device=sampler.device).expand(len(z))):
        return sampler.finish(sampler.g(z, a)).cpu()


@contextlib.contextmanager
def blended(g: nn.Module, other: Tensor, share: Tensor) -> Iterator[None]:
    """Inside, every embedding of `g` gives what lies between the label it is asked for and `other` [N], by `share` [N].

    All families here read labels through embeddings alone.
    """

    def between(layer: Any, given: Any, found: Tensor) -> Tensor:
        return torch.lerp(found, layer.weight[other], share[:, None].to(found.dtype))

    embeddings = [part for part in g.modules() if isinstance(part, nn.Embedding)]
    hooks = [layer.register_forward_hook(between) for layer in embeddings]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
