"""A model as a folder that can go anywhere: weights, config.json, a model card and a grid of samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.image_grid import save_images
from paragan.models.model import Model, save_model
from paragan.models.model_card import make_model_card
from paragan.models.sampler import PerLabelSampler

MAX_GRID_SAMPLES = 64  # samples of the grid, fewer of large images
MAX_GRID_PIXELS = 1 << 20


def write_model_folder(model: Model, out: Path) -> None:
    """What is needed to sample, and what tells people about it: model.safetensors (per label: a folder each),
    config.json, README.md, samples.png. Those that are there are replaced."""
    if isinstance(model.sampler, PerLabelSampler):
        for label in range(model.spec.classes):
            model.sampler.for_label(label)  # all are there, and of one kind
    with write_errors_as_usage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_weights(model, out)
        atomic_write_bytes(out / "README.md", make_model_card(model).encode())
    if not model.spec.array_shape:
        count = min(MAX_GRID_SAMPLES, max(4, MAX_GRID_PIXELS // model.spec.resolution**2))
        save_images(model.sample(count), None, out / "samples.png")


def check_new_folder(out: Path) -> None:
    """Unusable where there is something already."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"--out {out} has files in it, or is one: give an empty or a new folder")


@contextlib.contextmanager
def write_errors_as_usage_errors(out: Path) -> Iterator[None]:
    """Unusable where nothing can be written."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out {out} cannot be written: {error.strerror}") from error


def _write_weights(model: Model, out: Path) -> None:
    if not isinstance(model.sampler, PerLabelSampler):
        save_model(out, model.g, None, model.config)
        return
    for file in [*model.folder.glob("*/*"), *model.folder.glob("*")]:
        if file.name in ("model.safetensors", "config.json"):
            target = out / file.relative_to(model.folder)
            target.parent.mkdir(exist_ok=True)
            atomic_write_bytes(target, file.read_bytes())
