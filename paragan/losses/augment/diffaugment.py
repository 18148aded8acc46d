"""DiffAugment: augments every image in every step.

Zhao, Liu, Lin, Zhu and Han, "Differentiable Augmentation for Data-Efficient GAN Training", 2020. Augmentations and
their ranges are those of the authors' code.
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
    """Split `color,cutout`, as typed on the command line."""
    return tuple(value.split(",")) if isinstance(value, str) else value


@config_class
class DiffAugment:
    """Random colour, translation by up to an eighth, and cutout of a square of half the size.

    policy : which of color, translation, cutout (the paper: all three for small data sets, translation on ImageNet)
    """

    name: Literal["diffaugment"] = "diffaugment"
    policy: Annotated[tuple[AugmentKind, ...], BeforeValidator(_split_list), Field(min_length=1)] = (
        "color",
        "translation",
        "cutout",
    )

    def __call__(self, images: Tensor, rng: LaneRng, stream: str, probability: Tensor | None) -> Tensor:
        """Augment images [N, C, H, W]; at least float32, differentiable once. `probability` is ignored."""
        x = images.to(torch.promote_types(images.dtype, torch.float32))
        u = rng.uniform(stream, 7).to(x.dtype)
        for kind in self.policy:
            x = _AUGMENTATIONS[kind](x, u)
        return x


def _color(x: Tensor, u: Tensor) -> Tensor:
    """Change brightness, then saturation, then contrast."""
    brightness, saturation, contrast = (u[:, i, None, None, None] for i in range(3))
    x = x + (brightness - 0.5)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * (2 * saturation)
    mean = x.mean((1, 2, 3), keepdim=True)
    return mean + (x - mean) * (contrast + 0.5)


def _translation(x: Tensor, u: Tensor) -> Tensor:
    limits = [int(size / 8 + 0.5) for size in x.shape[2:]]
    down, right = (((2 * limit + 1) * u[:, i]).floor().long() - limit for i, limit in zip((3, 4), limits))
    return translate(x, down, right)


def _cutout(x: Tensor, u: Tensor) -> Tensor:
    rows = _cutout_rows(x.shape[2], u[:, 5])
    columns = _cutout_rows(x.shape[3], u[:, 6])
    return x * ~(rows[:, None, :, None] & columns[:, None, None, :])


def _cutout_rows(size: int, u: Tensor) -> Tensor:
    """Return which rows are cut out, bool [N, size]: half of them, around a random centre."""
    length = int(size / 2 + 0.5)
    start = ((size + 1 - length % 2) * u).floor()[:, None] - length // 2
    index = torch.arange(size, device=u.device)
    return (index >= start) & (index < start + length)


_AUGMENTATIONS = {"color": _color, "translation": _translation, "cutout": _cutout}
