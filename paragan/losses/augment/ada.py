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

from paragan.core.rng import Draw
from paragan.core.schema import record

UNIFORMS, NORMALS = 24, 8  # what one image's changes take


@record
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

    def __call__(self, images: Tensor, draw: Draw, stream: str, chance: Tensor | None) -> Tensor:
        """[N, C, H, H] to the same, at least float32. Differentiable once. chance: p, a scalar."""
        assert chance is not None
        x = images.to(torch.promote_types(images.dtype, torch.float32))
        dice = Dice(
            draw.uniform(f"{stream}/uniform", UNIFORMS).to(x.dtype),
            draw.normal(f"{stream}/normal", NORMALS).to(x.dtype),
            chance.to(x.dtype),
        )
        with torch.autocast(x.device.type, enabled=False):
            return _coloured(_placed(x, dice), dice)


class Dice:
    """Random numbers of N images, each used once; a change that an image is spared has its neutral value."""

    def __init__(self, uniform: Tensor, normal: Tensor, chance: Tensor):
        self.chance = chance
        self._uniform, self._normal = iter(uniform.unbind(1)), iter(normal.unbind(1))

    def uniform(self) -> Tensor:
        return next(self._uniform)

    def normal(self) -> Tensor:
        return next(self._normal)

    def some(self, value: Tensor, neutral: float, chance: Tensor | None = None) -> Tensor:
        """`value` [N] with the chance p (or that given), else `neutral`."""
        return torch.where(self.uniform() < (self.chance if chance is None else chance), value, neutral)


def _placed(x: Tensor, dice: Dice) -> Tensor:
    """Every image seen through one affine map, the product of its changes, reflected beyond its edges."""
    theta = _inverse(x, dice)
    grid = F.affine_grid(theta[:, :2], list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _inverse(x: Tensor, dice: Dice) -> Tensor:
    """[N, 3, 3] where each pixel comes from, in coordinates from -1 to 1; changes in the paper's order."""
    size = x.shape[-1]
    one, none = torch.ones_like(dice.chance).expand(len(x)), torch.zeros_like(dice.chance).expand(len(x))
    turn = 2 * math.pi
    mirror = dice.some(1 - 2 * (2 * dice.uniform()).floor(), 1.0)
    quarter = dice.some((4 * dice.uniform()).floor(), 0.0) * (turn / 4)
    whole = [dice.some(((dice.uniform() * 2 - 1) * (size / 8)).round() * (2 / size), 0.0) for _ in range(2)]
    larger = dice.some(torch.exp2(dice.normal() * 0.2), 1.0)
    either = 1 - (1 - dice.chance).clamp(min=0).sqrt()  # of two rotations, so that one of them happens with chance p
    before = dice.some((dice.uniform() * 2 - 1) * (turn / 2), 0.0, either)
    longer = dice.some(torch.exp2(dice.normal() * 0.2), 1.0)
    after = dice.some((dice.uniform() * 2 - 1) * (turn / 2), 0.0, either)
    shift = [dice.some(dice.normal() * (2 / 8), 0.0) for _ in range(2)]
    changes = (
        _scale(mirror, one),
        _rotation(quarter, none),
        _shift(*whole),
        _scale(1 / larger, 1 / larger),
        _rotation(before, none),
        _scale(1 / longer, longer),
        _rotation(after, none),
        _shift(*shift),
    )
    product = changes[0]
    for change in changes[1:]:
        product = product @ change
    return product


def _scale(x: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed(torch.stack([x, y, torch.ones_like(x)], -1))


def _rotation(angle: Tensor, none: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return _rows([cos, -sin, none], [sin, cos, none], [none, none, none + 1])


def _shift(x: Tensor, y: Tensor) -> Tensor:
    none = torch.zeros_like(x)
    return _rows([none + 1, none, x], [none, none + 1, y], [none, none, none + 1])


def _rows(*rows: list[Tensor]) -> Tensor:
    return torch.stack([torch.stack(row, -1) for row in rows], -2)


def _coloured(x: Tensor, dice: Dice) -> Tensor:
    """[N, C, H, W] of 1 or 3 channels, its colours mapped by a matrix and a shift; grey has no hue."""
    channels = x.shape[1]
    brighter = dice.some(dice.normal() * 0.2, 0.0)
    contrast = dice.some(torch.exp2(dice.normal() * 0.5), 1.0)
    inverted = dice.some((2 * dice.uniform()).floor(), 0.0)
    angle = dice.some((dice.uniform() * 2 - 1) * math.pi, 0.0)
    saturation = dice.some(torch.exp2(dice.normal()), 1.0)
    luma = contrast * (1 - 2 * inverted)  # along grey; inversion mirrors brightness alone, and leaves hues
    lighter = (brighter * luma)[:, None, None, None]
    if channels == 1:
        return x * luma[:, None, None, None] + lighter
    grey = x.mean(1, keepdim=True)
    hue = _hue(angle) * (contrast * saturation)[:, None, None]
    return grey * luma[:, None, None, None] + lighter + (hue @ (x - grey).flatten(2)).view_as(x)


def _hue(angle: Tensor) -> Tensor:
    """[N, 3, 3] a rotation about the grey axis (Rodrigues)."""
    cos, sin = angle.cos(), angle.sin() / math.sqrt(3)
    same = (1 + 2 * cos) / 3
    left, right = (1 - cos) / 3 - sin, (1 - cos) / 3 + sin
    return _rows([same, left, right], [right, same, left], [left, right, same])
