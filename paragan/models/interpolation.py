"""Interpolate between latents, and between labels.

Labels are interpolated by hooks on the embedding layers, the only layers through which our networks read labels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.host_copies import copy_to_device
from paragan.models.sampler import Sampler


def slerp(a: Tensor, b: Tensor, t: Tensor) -> Tensor:
    """Interpolate rows of a and b [N, latent] by t [N] in [0, 1]: directions on a great circle, lengths linearly.

    Shoemake 1985, eq. 2; latents in many dimensions lie near a sphere (White 2016). Parallel and opposite vectors are
    interpolated linearly.
    """
    x, y = a.double(), b.double()
    t = t.double()[:, None]
    lengths = torch.stack([x.norm(dim=1), y.norm(dim=1)])[:, :, None].clamp(min=1e-12)
    x, y = x / lengths[0], y / lengths[1]
    angle = torch.acos((x * y).sum(1, keepdim=True).clamp(-1, 1))
    sin = torch.sin(angle)
    is_parallel = sin < 1e-4
    weight_x, weight_y = (torch.where(is_parallel, s, torch.sin(s * angle) / sin) for s in (1 - t, t))
    return ((weight_x * x + weight_y * y) * (lengths[0] * (1 - t) + lengths[1] * t)).to(a.dtype)


@torch.no_grad()
def sample_interpolated(
    sampler: Sampler, z: Tensor, label_pair: tuple[int, int] | None, weight: Tensor | float = 0.0
) -> Tensor:
    """Return images, uint8 [N, C, H, W], of latents [N, latent] and of labels between the two of `label_pair`.

    weight: of the second label, a number or [N].
    """
    z = copy_to_device(z.contiguous(), sampler.device)
    if label_pair is None:
        return _render(sampler, z, None)
    a, b = (torch.full((len(z),), label, device=sampler.device) for label in label_pair)
    if label_pair[0] == label_pair[1]:
        return _render(sampler, z, a)
    with blended_labels(sampler, b, copy_to_device(torch.as_tensor(weight), sampler.device).expand(len(z))):
        return _render(sampler, z, a)


def _render(sampler: Sampler, z: Tensor, labels: Tensor | None) -> Tensor:
    """Return the images of latents; of a generator with styles with the same noise, which would flicker."""
    g: Any = sampler.g
    output = g.from_styles(g.styles(z, labels)) if sampler.has_styles else sampler.generate(z, labels)
    return sampler.to_output(output).cpu()


@contextlib.contextmanager
def blended_labels(sampler: Sampler, other_labels: Tensor, weight: Tensor) -> Iterator[None]:
    """Inside the block, label embeddings return values between their label and `other_labels` [N], by `weight` [N]."""

    def interpolate(layer: Any, inputs: Any, output: Tensor) -> Tensor:
        return torch.lerp(output, layer.weight[other_labels].to(output.dtype), weight[:, None].to(output.dtype))

    hooks = [layer.register_forward_hook(interpolate) for layer in label_embeddings(sampler)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def label_embeddings(sampler: Sampler) -> list[nn.Embedding]:
    """Return the embedding layers through which a generator reads labels."""
    classes = len(sampler.prior.probabilities)
    return [
        module
        for module in sampler.g.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == classes
    ]
