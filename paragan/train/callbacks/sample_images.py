"""What looks on between rounds: each observer knows when it has something to do."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paragan.config.user_code import conditioning_input_of, render_fn_of
from paragan.core.array_plots import check_picture, num_panels, plot_arrays
from paragan.core.atomic_write import atomic_output
from paragan.core.image_grid import integer_upscale, make_grid
from paragan.data.dataset import Dataset
from paragan.models.sampler import PerLabelSampler, Sampler
from paragan.train.averaged_model import averaged_sampler
from paragan.train.callbacks.log import LogCallback
from paragan.train.session import Session, has_crossed_kimg

SAMPLE_SEED = 0


@dataclass(frozen=True)
class SampleCallback:
    """Sample grids of the averaged generator, always from the same latents; the first after the first round."""

    folder: Path
    dataset: Dataset
    log: LogCallback

    def __call__(self, session: Session) -> None:
        due = (
            session.clock.step == 1 or has_crossed_kimg(session, session.run.output.fakes_kimg) or session.clock.is_done
        )
        if due and (session.world.is_main or not session.role.main_has_all_players):
            self.draw(session)

    def draw(self, session: Session) -> None:
        run, path = session.run, self.folder / f"fakes{round(session.clock.kimg):06d}.png"
        with averaged_sampler(session, self.dataset) as sampler:
            if not session.world.is_main:
                return
            pictures = draw_fakes(sampler, run.nets, self.dataset, session.game.labels, path)
        self.log.tensorboard.add_images("fakes", pictures[:64], session.clock.images, dataformats="NHWC")


def draw_fakes(
    sampler: Sampler | PerLabelSampler, nets: Any, dataset: Dataset, labels: np.ndarray | None, path: Path
) -> np.ndarray:
    """Write the picture of a sampler's images: a grid, or as their networks or their shape have it. Returns what is in
    it, [n, H, W, 3] uint8. labels : of the data, where G is told them."""
    if has_image_grid(nets, dataset) or (isinstance(sampler, PerLabelSampler) and not dataset.is_array):
        indices, wanted, columns = grid_layout(labels)
        fakes = sampler.images(indices, wanted, SAMPLE_SEED).permute(0, 2, 3, 1).numpy()
        save_grid(fakes, columns, path)
        return fakes if fakes.shape[-1] == 3 else fakes.repeat(3, axis=-1)
    shown = range(num_panels(dataset.shape))
    picture = render_samples(
        nets, sampler.images(shown, sampler.labels(shown, SAMPLE_SEED), SAMPLE_SEED).numpy(), dataset
    )
    save_png(picture, path)
    return picture[None]


def has_image_grid(nets: Any, dataset: Dataset) -> bool:
    """Whether samples are shown as a grid of images, each from a latent."""
    return not dataset.is_array and render_fn_of(nets) is None and conditioning_input_of(nets) is None


def render_samples(nets: Any, samples: np.ndarray, dataset: Dataset) -> np.ndarray:
    """Samples [n, ...] as their networks draw them, or by their shape; images that were made of images beside those.
    [H, W, 3] uint8."""
    reals = dataset.images[np.arange(len(samples)) % len(dataset.images)]
    if not dataset.is_array:
        reals = reals.transpose(0, 3, 1, 2)
    if draw := render_fn_of(nets):
        return check_picture(draw(samples, reals), nets.name)
    if dataset.is_array:
        return plot_arrays(samples, reals)
    pairs = np.stack([reals, samples], 1).reshape(-1, *samples.shape[1:]).transpose(0, 2, 3, 1)
    sheet = np.asarray(make_grid(pairs, 12, scale=integer_upscale(pairs)))
    return sheet if sheet.ndim == 3 else sheet[:, :, None].repeat(3, 2)


def save_png(picture: np.ndarray, path: Path) -> None:
    with atomic_output(path) as hidden:
        Image.fromarray(picture).save(hidden, format="png")


def draw_reals(dataset: Dataset, folder: Path, has_labels: bool = True, nets: Any = None) -> None:
    """reals.png, in the layout of the fakes, once."""
    path = folder / "reals.png"
    if path.exists():
        return
    if not has_image_grid(nets, dataset):
        reals = dataset.images[np.arange(num_panels(dataset.shape)) % len(dataset.images)]
        save_png(render_samples(nets, reals if dataset.is_array else reals.transpose(0, 3, 1, 2), dataset), path)
        return
    labels = dataset.labels if has_labels else None
    indices, wanted, columns = grid_layout(labels)
    chosen = np.arange(len(indices)) % len(dataset.images)
    if wanted is not None and labels is not None:
        for label in np.unique(wanted):
            of_label, there = np.flatnonzero(labels == label), np.flatnonzero(wanted == label)
            chosen[there] = of_label[np.arange(len(there)) % len(of_label)]
    save_grid(dataset.images[chosen], columns, path)


def grid_layout(labels: np.ndarray | None) -> tuple[list[int], np.ndarray | None, int]:
    """(sample indices, labels, columns) of a grid: a column a class that has images (the first 16), else 10 x 10."""
    if labels is None:
        return list(range(100)), None, 10
    shown = np.unique(labels)[:16].astype(np.int64)
    rows = max(6, min(10, 100 // len(shown)))
    return list(range(rows * len(shown))), np.tile(shown, rows), len(shown)


def save_grid(images: np.ndarray, columns: int, path: Path) -> None:
    aside = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    make_grid(images, columns, scale=integer_upscale(images)).save(aside, format="png")
    aside.rename(path)
