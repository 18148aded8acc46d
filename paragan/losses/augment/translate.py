"""Images moved by whole pixels, each by its own."""

from __future__ import annotations

import torch
from torch import Tensor


def translate(images: Tensor, down: Tensor, right: Tensor, reflect: bool = False) -> Tensor:
    """[N, C, H, W], every image moved down and right by its own whole number of pixels, int64 [N].

    What comes in from outside is 0, or with `reflected` the image mirrored at its edge. Pixels are copied, so that
    nothing is rounded; without `reflected` none is copied twice, and the gradient is as exact.
    """
    rows, inside_rows = _source_indices(down, images.shape[2], reflect)
    columns, inside_columns = _source_indices(right, images.shape[3], reflect)
    images = images.gather(2, rows[:, None, :, None].expand_as(images))
    images = images.gather(3, columns[:, None, None, :].expand_as(images))
    if reflect:
        return images
    return images * (inside_rows[:, None, :, None] & inside_columns[:, None, None, :])


def _source_indices(offset: Tensor, size: int, reflect: bool) -> tuple[Tensor, Tensor]:
    """[N, size] where each row comes from, and whether that is in the image."""
    at = torch.arange(size, device=offset.device) - offset[:, None]
    inside = (at >= 0) & (at < size)
    if not reflect:
        return at % size, inside
    at = at.abs()
    return torch.minimum(at, 2 * (size - 1) - at), inside
