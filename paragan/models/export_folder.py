"""A model as a folder that can go anywhere: weights, config.json, a model card and a grid of samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from paragan.core.atomic_write import write_whole
from paragan.core.errors import Unusable
from paragan.core.image_grid import save_images
from paragan.models.model import Model, save_model
from paragan.models.model_card import card
from paragan.models.sampler import Merged

SHOWN = 64  # samples of the grid, fewer of large images
SHOWN_PIXELS = 1 << 20


def write_folder(model: Model, out: Path) -> None:
    """What is needed to sample, and what tells people about it: model.safetensors (per label: a folder each),
    config.json, README.md, samples.png. Those that are there are replaced."""
    if isinstance(model.sampler, Merged):
        for label in range(model.spec.classes):
            model.sampler.of(label)  # all are there, and of one kind
    with writable(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_weights(model, out)
        write_whole(out / "README.md", card(model).encode())
    if not model.spec.values:
        count = min(SHOWN, max(4, SHOWN_PIXELS // model.spec.resolution**2))
        save_images(model.sample(count), None, out / "samples.png")


def need_new_folder(out: Path) -> None:
    """Unusable where there is something already."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise Unusable(f"--out {out} has files in it, or is one: give an empty or a new folder")


@contextlib.contextmanager
def writable(out: Path) -> Iterator[None]:
    """Unusable where nothing can be written."""
    try:
        yield
    except OSError as error:
        raise Unusable(f"--out {out} cannot be written: {error.strerror}") from error


def _write_weights(model: Model, out: Path) -> None:
    if not isinstance(model.sampler, Merged):
        save_model(out, model.g, None, model.config)
        return
    for file in [*model.folder.glob("*/*"), *model.folder.glob("*")]:
        if file.name in ("model.safetensors", "config.json"):
            target = out / file.relative_to(model.folder)
            target.parent.mkdir(exist_ok=True)
            write_whole(target, file.read_bytes())
