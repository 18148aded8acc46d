"""What looks on between rounds: each observer knows when it has something to do."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paragan.config.user_code import given_of, picture_of
from paragan.core.array_plots import checked, drawn, how_many
from paragan.core.atomic_write import aside
from paragan.core.image_grid import grid, readable
from paragan.data.dataset import Images
from paragan.models.sampler import Merged, Sampler
from paragan.train.averaged_model import averaged_sampler
from paragan.train.callbacks.log import Log
from paragan.train.session import Session, every

GRID_SEED = 0


@dataclass(frozen=True)
class Pictures:
    """Sample grids of the averaged generator, always from the same latents; the first after the first round."""

    folder: Path
    images: Images
    log: Log

    def __call__(self, session: Session) -> None:
        due = session.clock.step == 1 or every(session, session.run.output.fakes_kimg) or session.clock.done
        if due and (session.world.first or not session.role.first_has_all):
            self.draw(session)

    def draw(self, session: Session) -> None:
        run, path = session.run, self.folder / f"fakes{round(session.clock.kimg):06d}.png"
        with averaged_sampler(session, self.images) as sampler:
            if not session.world.first:
                return
            pictures = draw_fakes(sampler, run.nets, self.images, session.game.labels, path)
        self.log.board.add_images("fakes", pictures[:64], session.clock.images, dataformats="NHWC")


def draw_fakes(
    sampler: Sampler | Merged, nets: Any, images: Images, labels: np.ndarray | None, path: Path
) -> np.ndarray:
    """Write the picture of a sampler's images: a grid, or as their networks or their shape have it. Returns what is in
    it, [n, H, W, 3] uint8. labels : of the data, where G is told them."""
    if plain_grid(nets, images) or (isinstance(sampler, Merged) and not images.numbers):
        indices, wanted, columns = layout(labels)
        fakes = sampler.images(indices, wanted, GRID_SEED).permute(0, 2, 3, 1).numpy()
        save_grid(fakes, columns, path)
        return fakes if fakes.shape[-1] == 3 else fakes.repeat(3, axis=-1)
    shown = range(how_many(images.shape))
    picture = pictured(nets, sampler.images(shown, sampler.labels(shown, GRID_SEED), GRID_SEED).numpy(), images)
    save_picture(picture, path)
    return picture[None]


def plain_grid(nets: Any, images: Images) -> bool:
    """Whether samples are shown as a grid of images, each from a latent."""
    return not images.numbers and picture_of(nets) is None and given_of(nets) is None


def pictured(nets: Any, made: np.ndarray, images: Images) -> np.ndarray:
    """Samples [n, ...] as their networks draw them, or by their shape; images that were made of images beside those.
    [H, W, 3] uint8."""
    reals = images.images[np.arange(len(made)) % len(images.images)]
    if not images.numbers:
        reals = reals.transpose(0, 3, 1, 2)
    if draw := picture_of(nets):
        return checked(draw(made, reals), nets.name)
    if images.numbers:
        return drawn(made, reals)
    pairs = np.stack([reals, made], 1).reshape(-1, *made.shape[1:]).transpose(0, 2, 3, 1)
    sheet = np.asarray(grid(pairs, 12, scale=readable(pairs)))
    return sheet if sheet.ndim == 3 else sheet[:, :, None].repeat(3, 2)


def save_picture(picture: np.ndarray, path: Path) -> None:
    with aside(path) as hidden:
        Image.fromarray(picture).save(hidden, format="png")


def draw_reals(images: Images, folder: Path, labelled: bool = True, nets: Any = None) -> None:
    """reals.png, in the layout of the fakes, once."""
    path = folder / "reals.png"
    if path.exists():
        return
    if not plain_grid(nets, images):
        reals = images.images[np.arange(how_many(images.shape)) % len(images.images)]
        save_picture(pictured(nets, reals if images.numbers else reals.transpose(0, 3, 1, 2), images), path)
        return
    labels = images.labels if labelled else None
    indices, wanted, columns = layout(labels)
    chosen = np.arange(len(indices)) % len(images.images)
    if wanted is not None and labels is not None:
        for label in np.unique(wanted):
            of_label, there = np.flatnonzero(labels == label), np.flatnonzero(wanted == label)
            chosen[there] = of_label[np.arange(len(there)) % len(of_label)]
    save_grid(images.images[chosen], columns, path)


def layout(labels: np.ndarray | None) -> tuple[list[int], np.ndarray | None, int]:
    """(sample indices, labels, columns) of a grid: a column a class that has images (the first 16), else 10 x 10."""
    if labels is None:
        return list(range(100)), None, 10
    shown = np.unique(labels)[:16].astype(np.int64)
    rows = max(6, min(10, 100 // len(shown)))
    return list(range(rows * len(shown))), np.tile(shown, rows), len(shown)


def save_grid(images: np.ndarray, columns: int, path: Path) -> None:
    aside = path.with_name(f".{secrets.token_hex(8)}-{path.name}")
    grid(images, columns, scale=readable(images)).save(aside, format="png")
    aside.rename(path)
