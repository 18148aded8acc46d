"""Adaptive discriminator augmentation: each augmentation is applied with a probability p that adapts to overfitting.

Karras, Aittala, Hellsten, Laine, Lehtinen and Aila, "Training Generative Adversarial Networks with Limited Data", 2020,
section 3 and appendix B: pixel blitting, geometric and colour augmentations ("bgc"), which the paper recommends. p
itself is `AugmentProbability` in `losses/running_state.py`.
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

# Random numbers for one image.
NUM_UNIFORMS = 24
NUM_NORMALS = 8


@config_class
class ADA:
    """Mirroring, quarter turns, shifts, scale, rotation, stretching; brightness, contrast, inversion, hue, saturation.

    One departure: the paper resamples at twice the resolution through a wavelet filter, this bilinearly at image
    resolution. Hue and saturation change where there are three channels only; brightness, contrast and inversion
    change all channels.

    target : target of E[sign D(real)]: above it p grows, below it p falls
    kimg   : thousands of reals in which p can go from 0 to 1 (the paper: 500)
    """

    name: Literal["ada"] = "ada"
    target: Annotated[float, Field(gt=-1, lt=1)] = 0.6
    kimg: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 500.0

    def __call__(self, images: Tensor, rng: LaneRng, stream: str, probability: Tensor | None) -> Tensor:
        """Augment images [N, C, H, W] with `probability` p (a scalar); at least float32, differentiable once."""
        assert probability is not None
        x = images.to(torch.promote_types(images.dtype, torch.float32))
        sampler = AdaSampler(
            rng.uniform(f"{stream}/uniform", NUM_UNIFORMS).to(x.dtype),
            rng.normal(f"{stream}/normal", NUM_NORMALS).to(x.dtype),
            probability.to(x.dtype),
        )
        with torch.autocast(x.device.type, enabled=False):
            return _recolor(_transform(x, sampler), sampler)


class AdaSampler:
    """Random numbers for N images, each used once."""

    def __init__(self, uniform: Tensor, normal: Tensor, probability: Tensor):
        self.probability = probability
        self._uniform = iter(uniform.unbind(1))
        self._normal = iter(normal.unbind(1))

    def uniform(self) -> Tensor:
        """Return the next uniform numbers [N] in [0, 1)."""
        return next(self._uniform)

    def normal(self) -> Tensor:
        """Return the next normal numbers [N]."""
        return next(self._normal)

    def maybe_apply(self, value: Tensor, neutral: float, probability: Tensor | None = None) -> Tensor:
        """Return `value` [N] with probability p (or `probability`), else `neutral`, for each image."""
        return torch.where(self.uniform() < (self.probability if probability is None else probability), value, neutral)


def _transform(x: Tensor, sampler: AdaSampler) -> Tensor:
    """Apply all geometric augmentations as one affine map; beyond the edges the image is reflected."""
    theta = _inverse_affine(x, sampler)
    grid = F.affine_grid(theta[:, :2], list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _inverse_affine(x: Tensor, sampler: AdaSampler) -> Tensor:
    """Return the maps [N, 3, 3] from output to source coordinates (-1 to 1), composed in the paper's order."""
    height, width = x.shape[2:]
    aspect = height / width
    one = torch.ones_like(sampler.probability).expand(len(x))
    zero = torch.zeros_like(sampler.probability).expand(len(x))
    turn = 2 * math.pi
    mirror = sampler.maybe_apply(1 - 2 * (2 * sampler.uniform()).floor(), 1.0)
    quarter = sampler.maybe_apply((4 * sampler.uniform()).floor(), 0.0) * (turn / 4)
    pixel_shift = [
        sampler.maybe_apply(((sampler.uniform() * 2 - 1) * (size / 8)).round() * (2 / size), 0.0)
        for size in (width, height)
    ]
    scale = sampler.maybe_apply(torch.exp2(sampler.normal() * 0.2), 1.0)
    # The probability of each of two rotations, so that at least one happens with probability p.
    rotation_probability = 1 - (1 - sampler.probability).clamp(min=0).sqrt()
    first_rotation = sampler.maybe_apply((sampler.uniform() * 2 - 1) * (turn / 2), 0.0, rotation_probability)
    stretch = sampler.maybe_apply(torch.exp2(sampler.normal() * 0.2), 1.0)
    second_rotation = sampler.maybe_apply((sampler.uniform() * 2 - 1) * (turn / 2), 0.0, rotation_probability)
    shift = [sampler.maybe_apply(sampler.normal() * (2 / 8), 0.0) for _ in range(2)]
    matrices = (
        _scale_matrix(mirror, one),
        _rotation_matrix(quarter, zero, aspect),
        _shift_matrix(*pixel_shift),
        _scale_matrix(1 / scale, 1 / scale),
        _rotation_matrix(first_rotation, zero, aspect),
        _scale_matrix(1 / stretch, stretch),
        _rotation_matrix(second_rotation, zero, aspect),
        _shift_matrix(*shift),
    )
    product = matrices[0]
    for matrix in matrices[1:]:
        product = product @ matrix
    return product


def _scale_matrix(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y, torch.ones_like(x)], -1))


def _rotation_matrix(angle: Tensor, zero: Tensor, aspect: float) -> Tensor:
    """Rotate in pixels, where coordinates go from -1 to 1 over the width and over the height (`aspect` widths)."""
    cos, sin = angle.cos(), angle.sin()
    return _stack_rows([cos, -sin * aspect, zero], [sin / aspect, cos, zero], [zero, zero, zero + 1])


def _shift_matrix(x: Tensor, y: Tensor) -> Tensor:
    zero = torch.zeros_like(x)
    return _stack_rows([zero + 1, zero, x], [zero, zero + 1, y], [zero, zero, zero + 1])


def _stack_rows(*rows: list[Tensor]) -> Tensor:
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _recolor(x: Tensor, sampler: AdaSampler) -> Tensor:
    """Apply all colour augmentations to x [N, C, H, W]; only three channels have hue and saturation."""
    channels = x.shape[1]
    brightness = sampler.maybe_apply(sampler.normal() * 0.2, 0.0)
    contrast = sampler.maybe_apply(torch.exp2(sampler.normal() * 0.5), 1.0)
    inverted = sampler.maybe_apply((2 * sampler.uniform()).floor(), 0.0)
    angle = sampler.maybe_apply((sampler.uniform() * 2 - 1) * math.pi, 0.0)
    saturation = sampler.maybe_apply(torch.exp2(sampler.normal()), 1.0)
    luma = contrast * (1 - 2 * inverted)  # factor along the grey axis; inversion changes brightness, not hue
    shift = (brightness * luma)[:, None, None, None]
    if channels != 3:
        return x * luma[:, None, None, None] + shift
    grey = x.mean(1, keepdim=True)
    hue = _hue_matrix(angle) * (contrast * saturation)[:, None, None]
    return grey * luma[:, None, None, None] + shift + (hue @ (x - grey).flatten(2)).view_as(x)


def _hue_matrix(angle: Tensor) -> Tensor:
    """Return rotations about the grey axis, [N, 3, 3] (Rodrigues' formula)."""
    cos = angle.cos()
    sin = angle.sin() / math.sqrt(3)
    diagonal = (1 + 2 * cos) / 3
    above = (1 - cos) / 3 - sin
    below = (1 - cos) / 3 + sin
    return _stack_rows([diagonal, above, below], [below, diagonal, above], [above, below, diagonal])
