"""Path length regularization of a style-based generator (Karras et al. 2020, "StyleGAN2", section 3.2).

    E (|J^T y|_2 - a)^2      J = d images / d w, y normal with variance 1 / pixels, a the running mean of |J^T y|

Half of the images of a lane are used, as in the authors' training. Departure: `a` is that of the steps before, summed
over lanes and ranks, and not one that includes this rank's current lengths, so that n ranks equal one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paragan.core.errors import UsageError
from paragan.core.running_mean import RunningMean
from paragan.core.types import Batch


def check_generator(g: nn.Module) -> None:
    """Raise `UsageError` if G has no styles."""
    if not (hasattr(g, "styles") and hasattr(g, "synthesis")):
        raise UsageError(
            "objective.path_length: needs a generator with styles. Use --nets=stylegan2, a G with methods styles(z, y) "
            "and synthesis(ws), or --objective.path_length=0"
        )


def path_length_penalty(fake: Batch, running_mean: RunningMean) -> tuple[Tensor, Tensor]:
    """Return the penalty and the mean path length, both scalars.

    Args:
        fake: its `latents`, `labels` and `generator` are used: `styles(z, y)` -> ws [N, layers, style], and
            `synthesis(ws)` -> images.
        running_mean: of path lengths, a child of G (losses/running_state.py).
    """
    g: Any = fake.generator
    lanes = len(fake.rng.lanes)
    per_lane = fake.rng.per_lane
    rows = torch.arange(lanes * per_lane).view(lanes, per_lane)[:, : -(-per_lane // 2)].flatten()
    assert fake.latents is not None
    rows = rows.to(fake.latents.device)
    ws = g.styles(fake.latents[rows], None if fake.labels is None else fake.labels[rows])
    images = g.synthesis(ws)
    pixels = images.shape[2] * images.shape[3]
    y = fake.rng.normal("path length", *images.shape[1:])[rows].to(images.dtype) / pixels**0.5
    (gradients,) = torch.autograd.grad((images * y).sum(), ws, create_graph=True)
    lengths = gradients.float().square().sum(2).mean(1).sqrt()
    return (lengths - running_mean(lengths.detach())).square().mean(), lengths.detach().mean()
