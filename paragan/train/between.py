"""The way from one sample to another: between latents, and between classes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def slerp(a: np.ndarray, b: np.ndarray, t: np.ndarray) -> np.ndarray:
    """[n, F] on the arc from a [F] to b [F] at t [n] in [0, 1], as White, "Sampling Generative Networks", 2016: what
    lies between two normal vectors is as long as they are. A straight line where they point the same way or away."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    angle = np.arccos(np.clip(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-12), -1, 1))
    t = t[:, None]
    if np.sin(angle) < 1e-6:
        return ((1 - t) * a + t * b).astype(np.float32)
    return ((np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / np.sin(angle)).astype(np.float32)


@contextlib.contextmanager
def mixed(g: nn.Module, classes: int, a: int, b: int, t: Tensor) -> Iterator[int]:
    """Inside, the embeddings of classes of a network give row i the mean of those of a and b, b's share being t[i]. How
    many it has."""

    def mean(layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        assert isinstance(layer, nn.Embedding)
        share = t.to(output)[:, None]
        return torch.lerp(layer.weight[a].to(output.dtype), layer.weight[b].to(output.dtype), share)

    layers = [layer for layer in g.modules() if isinstance(layer, nn.Embedding) and layer.num_embeddings == classes]
    handles = [layer.register_forward_hook(mean) for layer in layers]
    try:
        yield len(layers)
    finally:
        for handle in handles:
            handle.remove()
