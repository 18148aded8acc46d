"""`paragan.load`: a model in one line, from wherever it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from paragan.data.dataset import Dataset
from paragan.models.model import Model, load_model

HUB_NAME_PATTERN = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def load(
    path: str | Path, device: str | torch.device = "cpu", nets: Any = None, dataset: Dataset | None = None
) -> Model:
    """A generator from a run folder, a model folder, RUN_DIR/best, a model.safetensors, or `user/name` on the Hugging
    Face hub (`user/name@revision`), unless there is such a folder. Runs no code from the files.

    model = paragan.load("runs/00000-digits-dcgan-sync-r1-b128")
    images = model.sample(16, labels=[3, 7], truncation=0.7, seed=0)        # uint8 [16, R, R, C]

    nets : networks of your own that it was trained with: the object, or `module:Class`
    data : what they are given, where that is data
    """
    name = HUB_NAME_PATTERN.fullmatch(str(path))
    if name and not Path(path).exists() and not Path(path).parent.exists():
        from paragan.models.hub import download_model

        path = download_model(name["name"], name["revision"])
    return load_model(path, torch.device(device), nets, dataset)
