"""`paragan.load`: load a model from a folder, an object store or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from paragan.data.dataset import Dataset
from paragan.data.storage.object_folder import download_for_reading, is_object_address
from paragan.models.model import Model, load_model

HUB_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def load(
    path: str | Path,
    device: str | torch.device = "cpu",
    nets: Any = None,
    dataset: Dataset | None = None,
    decoder: str = "",
) -> Model:
    """Load a trained generator. Runs no code from the files.

    model = paragan.load("runs/00000-digits-dcgan-sync-r1-b128")
    images = model.sample(16, labels=[3, 7], truncation=0.7, seed=0)        # uint8 [16, H, W, C]

    Args:
        path: a run folder, a model folder, RUN_DIR/best, a model.safetensors; a folder in an object store
            (s3://bucket/run); or, if there is no such folder, `user/name` or `user/name@revision` on the Hugging Face
            hub.
        device: where the generator runs.
        nets: your networks, if it was trained with such: the object, or `module:Class`.
        dataset: input data of the generator, if it takes data.
        decoder: the autoencoder that decodes its latents, a folder or `module:Class`; "" for the one that is recorded.

    Raises:
        UsageError: there is no model, or it cannot be used.
    """
    if is_object_address(str(path)):
        return load_model(download_for_reading(str(path), "model"), torch.device(device), nets, dataset, decoder)
    name = HUB_NAME_PATTERN.fullmatch(str(path))
    if name and not Path(path).exists() and not Path(path).parent.exists():
        from paragan.models.hub import download_model

        path = download_model(name["name"], name["revision"])
    return load_model(path, torch.device(device), nets, dataset, decoder)
