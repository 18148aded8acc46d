"""Write a data set of latents: the images of another, encoded by a frozen autoencoder (`paragan data encode`).

Every record is encoded in a batch of one size, so that its latents do not depend on the others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paragan.core.atomic_write import atomic_output
from paragan.core.errors import UsageError
from paragan.core.image_encoding import ImageEncoding, is_user_code
from paragan.core.image_shape import ImageSize
from paragan.core.schema import to_dict
from paragan.data.dataset import Dataset, load_data
from paragan.data.decode import check_fits_memory
from paragan.data.loader.device_transfer import read_model_input
from paragan.data.source import LabelChoice
from paragan.data.storage.filesystem import absolute_location, redact_url
from paragan.data.tools.parallel_map import ProgressFn
from paragan.models.autoencoder import LoadedAutoencoder

ENCODED_ROWS = 64  # of a pass; the last one is filled up
MIN_STD = 1e-6  # of a channel that is not constant


def encode_dataset(
    out: Path,
    autoencoder: LoadedAutoencoder,
    location: str,
    *,
    resolution: int | str | None,
    channels: int | None,
    labels: LabelChoice,
    value_range: str,
    max_pixels: int | None,
    device: torch.device,
    show_progress: ProgressFn,
) -> list[str]:
    """Write the latents of a data set of images to an .npz. Returns lines that say what it holds.

    Args:
        out: the file.
        autoencoder: encodes the images.
        location: of the images; `load_data` explains this and the following arguments.
        resolution: None takes the size that the autoencoder was trained on.
        channels: None takes those that it was trained on.
        labels: whether they are read, or the key or column that holds them.
        value_range: `data.range`.
        max_pixels: of an image.
        device: computes the latents.
        show_progress: gets the numbers of images that are encoded, and of all.

    Raises:
        UsageError: the images cannot be read, or the autoencoder is of others.
    """
    resolution, channels = _image_size(autoencoder, resolution, channels)
    dataset = load_data(
        location,
        resolution=resolution,
        channels=channels,
        labels=labels,
        max_pixels=max_pixels,
        value_range=value_range,
    )
    if dataset.is_array or dataset.fields:
        raise UsageError(f"data: {redact_url(location)} holds numbers or records. Use images")
    latents = encode_images(dataset, autoencoder, device, show_progress)
    mean, std = normalisation(latents)
    reference = autoencoder.reference
    encoding = ImageEncoding(
        decoder=reference if is_user_code(reference) else absolute_location(reference),
        fingerprint=autoencoder.fingerprint,
        mean=mean,
        std=std,
        image_shape=dataset.shape,  # pyright: ignore
        images=absolute_location(redact_url(location)),
        images_fingerprint=dataset.fingerprint,
        range=dataset.value_range.option if dataset.value_range else value_range,
        labels=labels,
    )
    write_latents(out, latents, dataset, encoding)
    shape = " x ".join(map(str, latents.shape[1:]))
    return [*dataset.describe().splitlines(), f"{len(latents):,} latents of {shape} in {out}"]


def _image_size(
    autoencoder: LoadedAutoencoder, resolution: int | str | None, channels: int | None
) -> tuple[int | str | None, int | None]:
    """Return resolution and channels of the images: those of the autoencoder. UsageError if others are requested."""
    if not autoencoder.image_shape:
        return resolution, channels
    trained_channels, height, width = autoencoder.image_shape
    trained = {"resolution": ImageSize(width, height).resolution, "channels": trained_channels}
    for option, requested in (("resolution", resolution), ("channels", channels)):
        if requested not in (None, trained[option]):
            raise UsageError(
                f"--{option}={requested}: {autoencoder.reference} was trained on {trained[option]}. Leave it out"
            )
    return trained["resolution"], trained_channels


@torch.no_grad()
def encode_images(
    dataset: Dataset, autoencoder: LoadedAutoencoder, device: torch.device, show_progress: ProgressFn
) -> np.ndarray:
    """Return the latents of all images of a data set, float32 [N, c, h, w].

    Raises:
        UsageError: the autoencoder does not fit the images, or its latents are no such array.
    """
    net: Any = autoencoder.net.to(device)
    count = len(dataset.images)
    latents = np.empty((0,), np.float32)
    for start in range(0, count, ENCODED_ROWS):
        rows = np.arange(start, min(start + ENCODED_ROWS, count))
        padded = np.pad(rows, (0, ENCODED_ROWS - len(rows)), mode="edge")
        images = read_model_input(dataset.images, padded, device).images
        if not start:
            shape = _latent_shape(net, images)
            check_fits_memory(4 * count * int(np.prod(shape)), f"latents {[count, *shape]}", "encode fewer images")
            latents = np.empty((count, *shape), np.float32)
        values = net.to_latents(images)[: len(rows)].float().cpu().numpy()
        if not np.isfinite(values).all():
            raise UsageError(f"--encoder: latents of images {start} to {rows[-1]} are NaN or infinite. Use another one")
        latents[rows] = values
        show_progress(int(rows[-1]) + 1, count)
    return latents


def _latent_shape(net: Any, images: Tensor) -> tuple[int, ...]:
    """Return the shape [c, h, w] of latents, after a trial of the autoencoder on a batch."""
    try:
        latents = net.to_latents(images)
        decoded = net.from_latents(latents)
    except Exception as error:  # of a user's own network
        raise UsageError(
            f"--encoder: cannot encode images {list(images.shape[1:])}: {type(error).__name__}: {error}. Use "
            "--resolution and --channels of its images"
        ) from error
    if latents.dim() != 4 or len(latents) != len(images) or not latents.is_floating_point():
        raise UsageError(
            f"--encoder: to_latents returned {latents.dtype} {list(latents.shape)}. Return floats [N, c, h, w]"
        )
    if decoded.shape != images.shape:
        raise UsageError(
            f"--encoder: from_latents returned {list(decoded.shape)} for images {list(images.shape)}. Return these"
        )
    return tuple(latents.shape[1:])


def normalisation(latents: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and the standard deviation of every channel of latents [N, c, h, w]; 1 for a constant channel."""
    mean = latents.mean((0, 2, 3), np.float64)
    std = latents.std((0, 2, 3), np.float64)
    return tuple(mean.tolist()), tuple(np.where(std < MIN_STD, 1.0, std).tolist())


def write_latents(out: Path, latents: np.ndarray, dataset: Dataset, encoding: ImageEncoding) -> None:
    """Write a data set of latents as an .npz: `x` normalised, labels and classes of the images, and the encoding.

    Args:
        out: the file, which appears complete or not at all.
        latents: [N, c, h, w], which are normalised in place.
        dataset: the images.
        encoding: holds the normalisation.
    """
    latents -= np.array(encoding.mean, np.float32)[:, None, None]
    latents /= np.array(encoding.std, np.float32)[:, None, None]
    arrays: dict[str, Any] = {"x": latents, "encoding": np.array(json.dumps(to_dict(encoding)))}
    if dataset.labels is not None:
        arrays |= {"labels": dataset.labels, "classes": np.array(dataset.classes)}
    with atomic_output(out) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)
