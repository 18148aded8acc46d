"""The way from one sample to another: between latents, and between labels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paragan.models.sampler import Sampler


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Rows between those of a and b [N, latent], t [N] from 0 to 1: over the great circle, lengths in proportion.

    Shoemake 1985, eq. 2; on directions, since normal numbers in many dimensions lie next to a sphere (White 2016). A
    straight line where they point the same way or away.
    """
    x, y, t = a.double(), b.double(), t.double()[:, None]
    lengths = torch.stack([x.norm(dim=1), y.norm(dim=1)])[:, :, None].clamp(min=1e-12)
    x, y = x / lengths[0], y / lengths[1]
    angle = torch.acos((x * y).sum(1, keepdim=True).clamp(-1, 1))
    whole, straight = torch.sin(angle), torch.sin(angle) < 1e-4
    first, second = (torch.where(straight, s, torch.sin(s * angle) / whole) for s in (1 - t, t))
    return ((first * x + second * y) * (lengths[0] * (1 - t) + lengths[1] * t)).to(a.dtype)


@torch.no_grad()
def sample_interpolated(
    sampler: Sampler, z: Tensor, label_pair: tuple[int, int] | None, weight: Tensor | float = 0.0
) -> Tensor:
    """Images [N, C, R, R] uint8 of latents, each of a blend of two labels: `share` of the second."""
    z = z.to(sampler.device)
    if label_pair is None:
        return sampler.to_output(sampler.g(z, None)).cpu()
    a, b = (torch.full((len(z),), label, device=sampler.device) for label in label_pair)
    if label_pair[0] == label_pair[1]:
        return sampler.to_output(sampler.g(z, a)).cpu()
    with blended_labels(sampler, b, torch.as_tensor(weight, device=sampler.device).expand(len(z))):
        return sampler.to_output(sampler.g(z, a)).cpu()


@contextlib.contextmanager
def blended_labels(sampler: Sampler, other_labels: Tensor, weight: Tensor) -> Iterator[None]:
    """Inside, every embedding of labels gives what lies between the label it is asked for and `other` [N], by `share`
    [N]. All families here read labels through embeddings alone."""

    def interpolate(layer: Any, inputs: Any, output: Tensor) -> Tensor:
        return torch.lerp(output, layer.weight[other_labels].to(output.dtype), weight[:, None].to(output.dtype))

    hooks = [layer.register_forward_hook(interpolate) for layer in label_embeddings(sampler)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def label_embeddings(sampler: Sampler) -> list[nn.Embedding]:
    """The layers by which a generator is told labels, where it is told by layers of this kind."""
    classes = len(sampler.prior.probabilities)
    return [part for part in sampler.g.modules() if isinstance(part, nn.Embedding) and part.num_embeddings == classes]
