"""Adaptive augmentation: each change with a chance p, which follows how well D knows the reals.

Karras, Aittala, Hellsten, Laine, Lehtinen and Aila, "Training Generative Adversarial Networks with Limited Data", 2020,
section 3 and appendix B: pixel blitting, geometric and colour changes ("bgc"), which is what the paper recommends.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from paragan.core.rng import LaneRng
from paragan.core.schema import config_class

NUM_UNIFORMS, NUM_NORMALS = 24, 8  # what one image's changes take


@config_class
class ADA:
    """Mirroring, quarter turns, shifts, scale, rotation, stretching; brightness, contrast, inversion, hue, saturation.

    One departure: the paper resamples at twice the resolution through a wavelet filter, this bilinearly at the image's
    own. Images must be square.

    target : of E[sign D(real)]: above it p grows, below it falls
    kimg   : thousands of reals in which p may come from 0 to 1 (the paper: 500)
    """

    name: Literal["ada"] = "ada"
    target: Annotated[float, Field(gt=-1, lt=1)] = 0.6
    kimg: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 500.0

    def __call__(self, images: Tensor, rng: LaneRng, stream: str, probability: Tensor | None) -> Tensor:
        """[N, C, H, H] to the same, at least float32. Differentiable once. chance: p, a scalar."""
        assert probability is not None
        x = images.to(torch.promote_types(images.dtype, torch.float32))
        dice = AdaSampler(
            rng.uniform(f"{stream}/uniform", NUM_UNIFORMS).to(x.dtype),
            rng.normal(f"{stream}/normal", NUM_NORMALS).to(x.dtype),
            probability.to(x.dtype),
        )
        with torch.autocast(x.device.type, enabled=False):
            return _recolor(_transform(x, dice), dice)


class AdaSampler:
    """Random numbers of N images, each used once; a change that an image is spared has its neutral value."""

    def __init__(self, uniform: Tensor, normal: Tensor, probability: Tensor):
        self.probability = probability
        self._uniform, self._normal = iter(uniform.unbind(1)), iter(normal.unbind(1))

    def uniform(self) -> Tensor:
        return next(self._uniform)

    def normal(self) -> Tensor:
        return next(self._normal)

    def maybe_apply(self, value: Tensor, neutral: float, probability: Tensor | None = None) -> Tensor:
        """`value` [N] with the chance p (or that given), else `neutral`."""
        return torch.where(self.uniform() < (self.probability if probability is None else probability), value, neutral)


def _transform(x: Tensor, sampler: AdaSampler) -> Tensor:
    """Every image seen through one affine map, the product of its changes, reflected beyond its edges."""
    theta = _inverse_affine(x, sampler)
    grid = F.affine_grid(theta[:, :2], list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _inverse_affine(x: Tensor, sampler: AdaSampler) -> Tensor:
    """[N, 3, 3] where each pixel comes from, in coordinates from -1 to 1; changes in the paper's order."""
    size = x.shape[-1]
    one, none = (
        torch.ones_like(sampler.probability).expand(len(x)),
        torch.zeros_like(sampler.probability).expand(len(x)),
    )
    turn = 2 * math.pi
    mirror = sampler.maybe_apply(1 - 2 * (2 * sampler.uniform()).floor(), 1.0)
    quarter = sampler.maybe_apply((4 * sampler.uniform()).floor(), 0.0) * (turn / 4)
    whole = [
        sampler.maybe_apply(((sampler.uniform() * 2 - 1) * (size / 8)).round() * (2 / size), 0.0) for _ in range(2)
    ]
    larger = sampler.maybe_apply(torch.exp2(sampler.normal() * 0.2), 1.0)
    either = (
        1 - (1 - sampler.probability).clamp(min=0).sqrt()
    )  # of two rotations, so that one of them happens with chance p
    before = sampler.maybe_apply((sampler.uniform() * 2 - 1) * (turn / 2), 0.0, either)
    longer = sampler.maybe_apply(torch.exp2(sampler.normal() * 0.2), 1.0)
    after = sampler.maybe_apply((sampler.uniform() * 2 - 1) * (turn / 2), 0.0, either)
    shift = [sampler.maybe_apply(sampler.normal() * (2 / 8), 0.0) for _ in range(2)]
    changes = (
        _scale_matrix(mirror, one),
        _rotation_matrix(quarter, none),
        _shift_matrix(*whole),
        _scale_matrix(1 / larger, 1 / larger),
        _rotation_matrix(before, none),
        _scale_matrix(1 / longer, longer),
        _rotation_matrix(after, none),
        _shift_matrix(*shift),
    )
    product = changes[0]
    for change in changes[1:]:
        product = product @ change
    return product


def _scale_matrix(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y, torch.ones_like(x)], -1))


def _rotation_matrix(angle: Tensor, zero: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return _stack_rows([cos, -sin, zero], [sin, cos, zero], [zero, zero, zero + 1])


def _shift_matrix(x: Tensor, y: Tensor) -> Tensor:
    none = torch.zeros_like(x)
    return _stack_rows([none + 1, none, x], [none, none + 1, y], [none, none, none + 1])


def _stack_rows(*rows: list[Tensor]) -> Tensor:
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _recolor(x: Tensor, sampler: AdaSampler) -> Tensor:
    """[N, C, H, W] of 1 or 3 channels, its colours mapped by a matrix and a shift; grey has no hue."""
    channels = x.shape[1]
    brighter = sampler.maybe_apply(sampler.normal() * 0.2, 0.0)
    contrast = sampler.maybe_apply(torch.exp2(sampler.normal() * 0.5), 1.0)
    inverted = sampler.maybe_apply((2 * sampler.uniform()).floor(), 0.0)
    angle = sampler.maybe_apply((sampler.uniform() * 2 - 1) * math.pi, 0.0)
    saturation = sampler.maybe_apply(torch.exp2(sampler.normal()), 1.0)
    luma = contrast * (1 - 2 * inverted)  # along grey; inversion mirrors brightness alone, and leaves hues
    lighter = (brighter * luma)[:, None, None, None]
    if channels == 1:
        return x * luma[:, None, None, None] + lighter
    grey = x.mean(1, keepdim=True)
    hue = _hue_matrix(angle) * (contrast * saturation)[:, None, None]
    return grey * luma[:, None, None, None] + lighter + (hue @ (x - grey).flatten(2)).view_as(x)


def _hue_matrix(angle: Tensor) -> Tensor:
    """[N, 3, 3] a rotation about the grey axis (Rodrigues)."""
    cos, sin = angle.cos(), angle.sin() / math.sqrt(3)
    same = (1 + 2 * cos) / 3
    left, right = (1 - cos) / 3 - sin, (1 - cos) / 3 + sin
    return _stack_rows([same, left, right], [right, same, left], [left, right, same])
