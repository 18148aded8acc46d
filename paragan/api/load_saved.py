"""`paragan.load`: a trained model, or the state of replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

import torch

from paragan.api.replica import Replica
from paragan.api.replica_files import load_replicas
from paragan.config.resolve import load_dataset
from paragan.config.sections import DataOptions
from paragan.core.errors import UsageError
from paragan.data.dataset import Dataset
from paragan.models import load as model_loading
from paragan.models.model import Model


@overload
def load(
    location: str | Path,
    *,
    device: str | torch.device = "cpu",
    nets: Any = None,
    dataset: Dataset | DataOptions | None = None,
    decoder: str = "",
) -> Model:
    """Load a trained generator."""


@overload
def load(location: str | Path, first: Replica, /, *others: Replica) -> dict[str, Any] | None:
    """Continue replicas."""


def load(
    location: str | Path,
    *replicas: Replica,
    device: str | torch.device = "cpu",
    nets: Any = None,
    dataset: Dataset | DataOptions | None = None,
    decoder: str = "",
) -> Model | dict[str, Any] | None:
    """Load a trained generator, or continue replicas from what `paragan.save` wrote. Runs no code from the files.

        model = paragan.load("runs/00000-digits-dcgan-sync-r1-b128")
        extra = paragan.load("checkpoints", gen, disc)

    Args:
        location: of a model (models/load.py), or the folder that was given to `paragan.save`.
        replicas: continue from the newest save, on all ranks (replica_files.py). Without any, a model is loaded.
        device: where the model runs.
        nets: your networks, if the model was trained with such: the object, or `module:Class`.
        dataset: input data of the generator, if it takes data; or the options to load them with.
        decoder: the autoencoder that decodes its latents, a folder or `module:Class`; "" for the one that is recorded.

    Returns:
        The model; or the `extra` of the save, None if nothing was saved yet.

    Raises:
        UsageError: there is no model, or it cannot be used; or the replicas are others than those that were saved.
    """
    if not replicas:
        if isinstance(dataset, DataOptions):
            dataset = load_dataset(dataset)
        return model_loading.load(location, device, nets, dataset, decoder)
    for replica in replicas:
        if isinstance(replica, str | torch.device):
            raise UsageError(f"load: {replica!r} is not a replica. Use device={str(replica)!r}")
    return load_replicas(location, *replicas)
