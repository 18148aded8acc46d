"""The styles of a StyleGAN2: walks, mixing, and the styles of a given image.

    frames = walk_styles(sampler, z, y, frames_per_stop=30)
    grid = mix_styles(model, rows=4, columns=6, from_layer=4, seed=0)     # uint8 [5 * 7, H, W, C], with its sources
    projection = project(model, photo, steps=500)                         # uint8 [H, W, C] -> styles and image

All images of a call have the same noise, so that only styles change them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paragan.core.errors import UsageError
from paragan.core.host_copies import copy_to_device
from paragan.models.model import Model
from paragan.models.sampler import Sampler
from paragan.nets import Spec

MEAN_SAMPLES = 1000  # of the distribution of styles, for a projection
WARM_UP, COOL_DOWN = 0.05, 0.25  # parts of a projection in which the learning rate rises and falls
LEARNING_RATE = 0.1
NOISE = 0.05  # on styles at the beginning of a projection, in standard deviations of w
NOISE_PART = 0.75  # of a projection, after which there is none
MIN_SIDE = 4  # of the smallest copies that are compared, pixels


@torch.no_grad()
def walk_styles(sampler: Sampler, z: Tensor, y: np.ndarray | None, frames_per_stop: int, truncation: float) -> Tensor:
    """Return the frames of a loop through samples whose styles are interpolated, uint8 [stops * frames, C, H, W].

    Args:
        sampler: of a model with styles.
        z: [stops, latent].
        y: int64 [stops], or None.
        frames_per_stop: between two samples.
        truncation: of styles.
    """
    g: Any = sampler.g
    w = _truncated_styles(sampler, z, y, truncation)
    t = torch.arange(frames_per_stop, device=w.device) / frames_per_stop
    frames = torch.lerp(w[:, None], w.roll(-1, 0)[:, None], t[:, None, None].to(w.dtype)).flatten(0, 1)
    return torch.cat([sampler.to_output(g.from_styles(ws)).cpu() for ws in frames.split(sampler.batch_size)])


@torch.no_grad()
def mix_styles(
    model: Model, rows: int, columns: int, from_layer: int, seed: int = 0, truncation: float = 1.0
) -> np.ndarray:
    """Return a grid of `rows` + 1 by `columns` + 1 images, uint8 [N, H, W, C], row by row.

    The first column and the first row are samples; every other image has the styles of the sample of its row, and from
    layer `from_layer` on those of the sample of its column. The first image is that of the mean style.

    Raises:
        UsageError: the model has no styles, or not so many layers.
    """
    sampler = style_sampler(model, "mixing styles")
    g: Any = sampler.g
    if not 0 < from_layer < g.num_styles:
        raise UsageError(f"--mix-from {from_layer}: the model has {g.num_styles} layers. Use 1 to {g.num_styles - 1}")
    z = sampler.source(range(rows + columns), seed, 1.0)
    w = _truncated_styles(sampler, z, model.labels(rows + columns, seed=seed), truncation)
    of_rows = torch.cat([_mean_styles(g), w[:rows]])
    of_columns = torch.cat([_mean_styles(g), w[rows:]])
    sheet = of_rows[:, None].repeat(1, columns + 1, 1, 1)
    sheet[1:, 1:, from_layer:] = of_columns[1:, from_layer:]
    sheet[0] = of_columns
    ws = sheet.flatten(0, 1).split(sampler.batch_size)
    return torch.cat([sampler.to_output(g.from_styles(part)).cpu() for part in ws]).permute(0, 2, 3, 1).numpy()


@dataclass(frozen=True)
class Projection:
    """Styles whose image is near a target.

    styles  : float32 [num_styles, style], the same for every layer
    image   : uint8 [H, W, C]
    psnr_db : peak signal-to-noise ratio of the image to the target
    """

    styles: np.ndarray
    image: np.ndarray
    psnr_db: float


def project(
    model: Model,
    target: np.ndarray,
    steps: int = 500,
    seed: int = 0,
    label: int | str | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Projection:
    """Find the style w of an image by gradient descent, from the mean style (Karras et al. 2020, appendix D).

    Adam with a rate that rises and falls, and noise on w that fades. Departures: images are compared by the mean
    squared distance of their pixels at all sizes down to 4, and not by the features of a VGG network, which would have
    to be downloaded; and the noise of the layers is fixed, and not optimized.

    Args:
        model: with styles.
        target: uint8 [H, W, C], of the size of the model's images.
        steps: of Adam.
        seed: of the noise on w.
        label: a class, from whose mean style it starts.
        on_step: called with the number of the step and the distance.

    Raises:
        UsageError: the model has no styles, or images of another size.
    """
    sampler = style_sampler(model, "projecting an image")
    if model.spec.image_shape:
        raise UsageError("projecting an image: the model makes latents. Use a model of images")
    _check_size(target, model.spec)
    g: Any = sampler.g
    target_images = copy_to_device(torch.from_numpy(target).permute(2, 0, 1)[None].float() / 127.5 - 1, sampler.device)
    z = sampler.source(range(MEAN_SAMPLES), seed, 1.0)
    with torch.no_grad():
        labels = model.labels(MEAN_SAMPLES, None if label is None else [label], seed)
        samples = torch.cat([g.mapping(*part) for part in _batches(sampler, z, labels)])
    spread = (samples - samples.mean(0)).square().sum(1).mean().sqrt()
    w = samples.mean(0, keepdim=True).clone().requires_grad_(True)
    optimizer = torch.optim.Adam([w], betas=(0.9, 0.999))
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = _learning_rate(step, steps)
        noisy = w + spread * _noise_scale(step / steps) * torch.randn(w.shape, generator=generator).to(w.device)
        loss = _distance(g.from_styles(noisy[:, None].expand(-1, g.num_styles, -1)), target_images)
        (w.grad,) = torch.autograd.grad(loss, w)
        optimizer.step()
        on_step(step, loss.item())
    with torch.no_grad():
        styles = w[:, None].expand(-1, g.num_styles, -1)
        image = sampler.to_output(g.from_styles(styles)).cpu()[0].permute(1, 2, 0).numpy()
    error = np.square(image.astype(np.float64) - target).mean()
    psnr_db = float(10 * np.log10(255**2 / max(error, 1e-10)))
    return Projection(styles[0].detach().cpu().numpy().copy(), image, psnr_db)


def _check_size(target: np.ndarray, spec: Spec) -> None:
    """Raise `UsageError` if an image has not the size of those of a model."""
    if target.shape != (*spec.shape[1:], spec.channels):
        size = spec.size
        raise UsageError(
            f"image: is [height, width, channels] {list(target.shape)}, and the model makes {size.height} x "
            f"{size.width} with {spec.channels} channels. Resize it to {size.width}x{size.height}"
        )


def _learning_rate(step: int, steps: int) -> float:
    """Return the rate of a step of a projection: it rises in the first steps and falls in the last ones."""
    return LEARNING_RATE * min(1, (1 - step / steps) / COOL_DOWN, (step + 1) / steps / WARM_UP)


def _noise_scale(progress: float) -> float:
    """Return the noise on styles at `progress` from 0 to 1 of a projection, in standard deviations of w."""
    return NOISE * max(0.0, 1 - progress / NOISE_PART) ** 2


def style_sampler(model: Model, action: str) -> Sampler:
    """Return the sampler of a model with styles. Raises `UsageError` if it has none."""
    sampler = model.sampler
    if not (isinstance(sampler, Sampler) and sampler.has_styles):
        raise UsageError(
            f"{action}: this model has no styles. Use a model that was trained with --nets=stylegan2 or --nets=gat"
        )
    return sampler


def _truncated_styles(sampler: Sampler, z: Tensor, y: np.ndarray | None, truncation: float) -> Tensor:
    g: Any = sampler.g
    return torch.cat([g.mapping.truncate(g.styles(*part), truncation) for part in _batches(sampler, z, y)])


def _batches(sampler: Sampler, z: Tensor, y: np.ndarray | None) -> list[tuple[Tensor, Tensor | None]]:
    labels = [None] * len(z) if y is None else torch.from_numpy(y).split(sampler.batch_size)
    on_device = [copy_to_device(part, sampler.device) for part in z.split(sampler.batch_size)]
    return [(part, None if of is None else copy_to_device(of, sampler.device)) for part, of in zip(on_device, labels)]


def _mean_styles(g: Any) -> Tensor:
    """Return the mean style for all layers, [1, num_styles, style]."""
    return g.mapping.average.mean.expand(1, g.num_styles, -1)


def _distance(images: Tensor, target_images: Tensor) -> Tensor:
    """Return the mean over sizes, down to MIN_SIDE, of the mean squared difference."""
    distances = [(images - target_images).square().mean()]
    while min(images.shape[2:]) // 2 >= MIN_SIDE and not (images.shape[2] | images.shape[3]) & 1:
        images, target_images = F.avg_pool2d(images, 2), F.avg_pool2d(target_images, 2)
        distances.append((images - target_images).square().mean())
    return torch.stack(distances).mean()
