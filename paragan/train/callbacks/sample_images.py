"""Write samples: fakesNNNNNN.png while a run trains, reals.png once in the same layout; waves also as files of audio.

Arrays that are no images, and images made from images, are drawn by the networks' own `render` or by their shape.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from paragan.config.user_code import conditioning_input_of, render_fn_of
from paragan.core.array_plots import check_picture, num_panels, plot_arrays
from paragan.core.atomic_write import atomic_output, atomic_write_bytes
from paragan.core.image_grid import integer_upscale, make_grid, visible_channels
from paragan.core.wav_files import encode_wav
from paragan.data.dataset import Dataset
from paragan.models.autoencoder import load_decoder
from paragan.models.sampler import PerLabelSampler, Sampler
from paragan.report.embedded_audio import GENERATED, MAX_PAIRS, REAL, wave_name, waves_dir
from paragan.train.averaged_model import averaged_sampler
from paragan.train.loggers.logger import Logger
from paragan.train.session import Session, has_crossed_kimg

SAMPLE_SEED = 0


@dataclass(frozen=True)
class SampleCallback:
    """Writes samples of the averaged generator, always from the same latents, the first after the first round."""

    folder: Path
    dataset: Dataset
    logger: Logger = field(default_factory=Logger)

    def __call__(self, session: Session) -> None:
        is_due = has_crossed_kimg(session, session.run.output.fakes_kimg)
        if session.clock.step == 1 or session.clock.is_done:
            is_due = True
        if is_due and (session.world.is_main or not session.role.main_has_all_players):
            self.draw(session)

    def draw(self, session: Session) -> None:
        """Write samples now. All ranks call this where rank 0 does not have both players."""
        with averaged_sampler(session, self.dataset) as sampler:
            if not session.world.is_main:
                return
            kimg = round(session.clock.kimg)
            pictures = draw_fakes(sampler, session.run.nets, self.dataset, session.game.labels, self.folder, kimg)
        self.logger.on_images(fakes_path(self.folder, kimg), pictures[:64], session.clock.images)


def fakes_path(folder: Path, kimg: int) -> Path:
    """Return the picture of samples in a run folder at this training time."""
    return folder / f"fakes{kimg:06d}.png"


def draw_fakes(
    sampler: Sampler | PerLabelSampler, nets: Any, dataset: Dataset, labels: np.ndarray | None, folder: Path, kimg: int
) -> np.ndarray:
    """Write a picture of a sampler's images to fakesNNNNNN.png, and waves with real ones to WAV files.

    Args:
        sampler: makes the images.
        nets: the networks, which may draw the picture.
        dataset: the real data.
        labels: of the data, if G is conditional; the grid then has a column per class.
        folder: of the run.
        kimg: training time, for the names of files.

    Returns:
        The images in it, [n, H, W, 3] uint8.
    """
    path = fakes_path(folder, kimg)
    if has_image_grid(nets, dataset) or (isinstance(sampler, PerLabelSampler) and dataset.shows_images):
        indices, sample_labels, columns = grid_layout(labels)
        fakes = sampler.images(indices, sample_labels, SAMPLE_SEED).permute(0, 2, 3, 1).numpy()
        save_grid(fakes, columns, path)
        visible = visible_channels(fakes)
        return visible if visible.shape[-1] == 3 else visible.repeat(3, axis=-1)
    indices = range(num_panels(dataset.sample_shape))
    samples = sampler.images(indices, sampler.labels(indices, SAMPLE_SEED), SAMPLE_SEED).numpy()
    picture = render_samples(nets, samples, dataset)
    save_png(picture, path)
    if dataset.sample_rate:
        write_wave_pairs(sampler, dataset, folder, kimg)
    return picture[None]


def write_wave_pairs(sampler: Sampler | PerLabelSampler, dataset: Dataset, folder: Path, kimg: int) -> None:
    """Write generated and real waves to samples/NNNNNNkimg/ of a run folder, of records from all parts of the data.

    Where G is given data, a real wave is the one that the generated wave of its number was made from.
    """
    num_records = len(dataset.images)
    count = min(MAX_PAIRS, num_records)
    indices = [number * num_records // count for number in range(count)]
    generated = sampler.images(indices, sampler.labels(indices, SAMPLE_SEED), SAMPLE_SEED).numpy()
    target = waves_dir(folder, kimg)
    target.mkdir(parents=True, exist_ok=True)
    for side, waves in ((GENERATED, generated), (REAL, dataset.images[np.array(indices)])):
        for number, samples in enumerate(waves):
            atomic_write_bytes(target / wave_name(number, side), encode_wav(samples, dataset.sample_rate))


def has_image_grid(nets: Any, dataset: Dataset) -> bool:
    """Return True if samples are drawn as a grid of images, each from a latent."""
    return dataset.shows_images and render_fn_of(nets) is None and conditioning_input_of(nets) is None


def render_samples(nets: Any, samples: np.ndarray, dataset: Dataset) -> np.ndarray:
    """Draw samples [n, ...] with the networks' own `render`, or by their shape; image pairs side by side.

    Returns:
        A picture, [H, W, 3] uint8.
    """
    reals = read_as_samples(dataset, np.arange(len(samples)) % len(dataset.images))
    render = render_fn_of(nets)
    if render:
        return check_picture(render(samples, reals), nets.name)
    if not dataset.shows_images:
        return plot_arrays(samples, reals)
    pairs = np.stack([reals, samples], 1).reshape(-1, *samples.shape[1:]).transpose(0, 2, 3, 1)
    sheet = np.asarray(make_grid(pairs, 12, scale=integer_upscale(pairs)))
    return sheet if sheet.ndim == 3 else sheet[:, :, None].repeat(3, 2)


def read_as_samples(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return records `rows` [n] as samples are: images uint8 [n, C, H, W], of latents the decoded ones, or numbers."""
    records = dataset.images[rows]
    if dataset.encoding:
        return load_decoder(dataset.encoding).to_pixels(torch.from_numpy(records)).numpy()
    return records if dataset.is_array else records.transpose(0, 3, 1, 2)


def save_png(picture: np.ndarray, path: Path) -> None:
    """Write a picture, [H, W, 3] uint8, complete or not at all."""
    with atomic_output(path) as temporary:
        Image.fromarray(picture).save(temporary, format="png")


def draw_reals(dataset: Dataset, folder: Path, has_labels: bool = True, nets: Any = None) -> None:
    """Write reals.png in the layout of the fakes, if there is none."""
    path = folder / "reals.png"
    if path.exists():
        return
    if not has_image_grid(nets, dataset):
        rows = np.arange(num_panels(dataset.sample_shape)) % len(dataset.images)
        save_png(render_samples(nets, read_as_samples(dataset, rows), dataset), path)
        return
    labels = dataset.labels if has_labels else None
    indices, cell_labels, columns = grid_layout(labels)
    rows = np.arange(len(indices)) % len(dataset.images)
    if cell_labels is not None and labels is not None:
        for label in np.unique(cell_labels):
            images_of_label = np.flatnonzero(labels == label)
            cells = np.flatnonzero(cell_labels == label)
            rows[cells] = images_of_label[np.arange(len(cells)) % len(images_of_label)]
    save_grid(read_as_samples(dataset, rows).transpose(0, 2, 3, 1), columns, path)


def grid_layout(labels: np.ndarray | None) -> tuple[list[int], np.ndarray | None, int]:
    """Return (sample indices, their labels, columns) of a grid.

    It has a column for each class with images (at most 16), or 10 x 10 images without labels.
    """
    if labels is None:
        return list(range(100)), None, 10
    classes = np.unique(labels)[:16].astype(np.int64)
    rows = max(6, min(10, 100 // len(classes)))
    return list(range(rows * len(classes))), np.tile(classes, rows), len(classes)


def save_grid(images: np.ndarray, columns: int, path: Path) -> None:
    """Write images, [n, H, W, C] uint8, as a grid, complete or not at all."""
    temporary = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    make_grid(images, columns, scale=integer_upscale(images)).save(temporary, format="png")
    temporary.rename(path)
