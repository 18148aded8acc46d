"""Translation by whole pixels, different for each image."""

from __future__ import annotations

import torch
from torch import Tensor


def translate(images: Tensor, down: Tensor, right: Tensor, reflect: bool = False) -> Tensor:
    """Shift every image of [N, C, H, W] down and right by its own whole number of pixels.

    Pixels are copied, so nothing is rounded. Without `reflect` no pixel is copied twice, so the gradient is exact too.

    Args:
        images: [N, C, H, W].
        down: int64 [N], pixels.
        right: int64 [N], pixels.
        reflect: Fill in the image reflected at its edge instead of zeros.
    """
    rows, inside_rows = _source_indices(down, images.shape[2], reflect)
    columns, inside_columns = _source_indices(right, images.shape[3], reflect)
    images = images.gather(2, rows[:, None, :, None].expand_as(images))
    images = images.gather(3, columns[:, None, None, :].expand_as(images))
    if reflect:
        return images
    return images * (inside_rows[:, None, :, None] & inside_columns[:, None, None, :])


def _source_indices(offset: Tensor, size: int, reflect: bool) -> tuple[Tensor, Tensor]:
    """Return the source index of each row, [N, size], and whether it is inside the image."""
    index = torch.arange(size, device=offset.device) - offset[:, None]
    inside = (index >= 0) & (index < size)
    if not reflect:
        return index % size, inside
    index = index.abs()
    return torch.minimum(index, 2 * (size - 1) - index), inside
