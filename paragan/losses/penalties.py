"""Gradient penalties on D: they differentiate it twice."""

from __future__ import annotations

import torch
from torch import Tensor

from ..batch import Batch, Net


def r1(on_real: Tensor, images: Tensor) -> Tensor:
    """E |grad_x D(x)|^2 on reals (Mescheder et al. 2018, eq. 9, without gamma / 2). Scalar.

    Takes the logits that D gave for `images`, which require a gradient: no second pass through D.
    """
    return _slope(on_real, images).square().sum(1).mean()


def gradient_penalty(d: Net, real: Batch, fake: Batch) -> Tensor:
    """E (|grad_x D(x)| - 1)^2 between reals and fakes (Gulrajani et al. 2017, eq. 3, without lambda). Scalar."""
    x = real.images.detach()
    alpha = real.draw.uniform("gradient penalty", *[1] * (x.dim() - 1)).to(x.dtype)
    between = torch.lerp(x, fake.images.detach().to(x.dtype), alpha)
    between.requires_grad_(True)
    slope = _slope(d(between, real.labels), between)
    return ((slope.square().sum(1) + 1e-12).sqrt() - 1).square().mean()


def _slope(logits: Tensor, images: Tensor) -> Tensor:
    """[N, CHW] the gradient of every logit with respect to its image."""
    (slope,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return slope.flatten(1)
