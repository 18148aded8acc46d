"""DiffAugment: every image is changed, always.

Zhao, Liu, Lin, Zhu and Han, "Differentiable Augmentation for Data-Efficient GAN Training", 2020; the changes and how
far they go as in the authors' code.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from paragan.core.rng import LaneRng
from paragan.core.schema import config_class
from paragan.losses.augment.translate import translate

AugmentKind = Literal["color", "translation", "cutout"]


def _split_list(value: Any) -> Any:
    """`color,cutout` is a list too."""
    return tuple(value.split(",")) if isinstance(value, str) else value


@config_class
class DiffAugment:
    """Changes of colour, shifts by up to an eighth, and a square of half the size put to 0.

    policy : which of them (the paper: all three where data are few; on ImageNet translation alone)
    """

    name: Literal["diffaugment"] = "diffaugment"
    policy: Annotated[tuple[AugmentKind, ...], BeforeValidator(_split_list), Field(min_length=1)] = (
        "color",
        "translation",
        "cutout",
    )

    def __call__(self, images: Tensor, rng: LaneRng, stream: str, probability: Tensor | None) -> Tensor:
        """[N, C, H, W] to the same, at least float32. Differentiable once. chance: not asked for."""
        x = images.to(torch.promote_types(images.dtype, torch.float32))
        u = rng.uniform(stream, 7).to(x.dtype)
        for kind in self.policy:
            x = _AUGMENTATIONS[kind](x, u)
        return x


def _color(x: Tensor, u: Tensor) -> Tensor:
    """Brightness, then saturation, then contrast."""
    brighter, saturation, contrast = (u[:, i, None, None, None] for i in range(3))
    x = x + (brighter - 0.5)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * (2 * saturation)
    middle = x.mean((1, 2, 3), keepdim=True)
    return middle + (x - middle) * (contrast + 0.5)


def _translation(x: Tensor, u: Tensor) -> Tensor:
    most = [int(size / 8 + 0.5) for size in x.shape[2:]]
    down, right = (((2 * m + 1) * u[:, i]).floor().long() - m for i, m in zip((3, 4), most))
    return translate(x, down, right)


def _cutout(x: Tensor, u: Tensor) -> Tensor:
    rows, columns = (_cutout_rows(x.shape[2 + i], u[:, 5 + i]) for i in range(2))
    return x * ~(rows[:, None, :, None] & columns[:, None, None, :])


def _cutout_rows(size: int, u: Tensor) -> Tensor:
    """[N, size] which rows are cut: half of them, around any of them."""
    length = int(size / 2 + 0.5)
    start = ((size + 1 - length % 2) * u).floor()[:, None] - length // 2
    at = torch.arange(size, device=u.device)
    return (at >= start) & (at < start + length)


_AUGMENTATIONS = {"color": _color, "translation": _translation, "cutout": _cutout}
