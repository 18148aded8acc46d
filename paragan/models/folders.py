"""A model as a folder that can go anywhere: weights, config.json, a model card and a grid of samples."""

from __future__ import annotations

from pathlib import Path

from ..data.grid import save_images
from ..errors import Unusable
from ..report.records import write_whole
from ..train.model import Model, save_model
from ..train.sampler import Merged
from .card import card

SHOWN = 64  # samples of the grid


def write_folder(model: Model, out: Path) -> None:
    """What is needed to sample, and what tells people about it: model.safetensors (per label: a folder each),
    config.json, README.md, samples.png. Unusable where the folder has files."""
    if isinstance(model.sampler, Merged):
        for label in range(model.spec.classes):
            model.sampler.of(label)  # all are there, and of one kind
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise Unusable(f"--out {out} has files in it: give an empty or a new folder")
        _write_weights(model, out)
        write_whole(out / "README.md", card(model).encode())
    except OSError as error:
        raise Unusable(f"--out {out} cannot be written: {error.strerror}") from error
    if not model.spec.values:
        save_images(model.sample(SHOWN), None, out / "samples.png")


def _write_weights(model: Model, out: Path) -> None:
    if not isinstance(model.sampler, Merged):
        save_model(out, model.g, None, model.config)
        return
    for file in [*model.folder.glob("*/*"), *model.folder.glob("*")]:
        if file.name in ("model.safetensors", "config.json"):
            target = out / file.relative_to(model.folder)
            target.parent.mkdir(exist_ok=True)
            write_whole(target, file.read_bytes())
