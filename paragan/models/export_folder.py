"""Export a model as a self-contained folder: weights, config.json, a model card and a grid of samples."""

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

MAX_GRID_SAMPLES = 64  # fewer if images are large
MAX_GRID_PIXELS = 1 << 20


def write_model_folder(model: Model, out: Path) -> None:
    """Write model.safetensors (per label: in a folder each), config.json, README.md and samples.png.

    Existing files are replaced.
    """
    if isinstance(model.sampler, PerLabelSampler):
        for label, probability in enumerate(model.sampler.prior.probabilities):
            if probability > 0:  # 0: it has no generator in a pool that may lack some
                model.sampler.for_label(label)  # raises if it is missing, or of another kind
    with write_errors_as_usage_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        _write_weights(model, out)
        atomic_write_bytes(out / "README.md", make_model_card(model).encode())
    if not model.spec.array_shape:
        count = min(MAX_GRID_SAMPLES, max(4, MAX_GRID_PIXELS // model.spec.sample_spec.size.pixels))
        save_images(model.sample(count), None, out / "samples.png")


def check_new_folder(out: Path) -> None:
    """Raise UsageError unless a folder is empty or does not exist."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise UsageError(f"--out {out}: a file, or a folder with files in it. Use an empty or a new folder")


@contextlib.contextmanager
def write_errors_as_usage_errors(out: Path) -> Iterator[None]:
    """Turn errors of writing inside the block into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error.strerror}") from error


def _write_weights(model: Model, out: Path) -> None:
    if not isinstance(model.sampler, PerLabelSampler):
        save_model(out, model.g, None, model.config)
        return
    for file in [*model.folder.glob("*/*"), *model.folder.glob("*")]:
        if file.name in ("model.safetensors", "config.json"):
            target = out / file.relative_to(model.folder)
            target.parent.mkdir(exist_ok=True)
            atomic_write_bytes(target, file.read_bytes())
