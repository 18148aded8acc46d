"""Find the files of a model, and read them consistently while a run may be replacing them.

A run replaces its model file by file. config.json comes last and holds the checksums of the weights that belong to it;
readers wait until they match.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from paragan.core.atomic_write import atomic_write_bytes
from paragan.core.errors import UsageError
from paragan.core.schema import read_yaml
from paragan.models.model_config import parse_model_config, read_config_bytes, read_model_config

MODEL_PARTS = ("model", "discriminator")
PER_LABEL = "per-label"  # the kind of a model with a generator for each label
REPLACE_TIMEOUT_S = 10.0  # to replace the files of a model
POLL_S = 0.05


@dataclass(frozen=True)
class ModelSnapshot:
    """A model whose weights and config.json belong together."""

    folder: Path
    config: dict[str, Any]
    config_bytes: bytes  # the file config.json
    weights: dict[str, bytes]  # of the parts model and discriminator, as safetensors

    def write_to(self, folder: Path) -> Path:
        """Write the files into a folder and return it."""
        for name, data in self.weights.items():
            atomic_write_bytes(folder / f"{name}.safetensors", data)
        atomic_write_bytes(folder / "config.json", self.config_bytes)
        return folder

    def load_into(self, net: nn.Module, part: str = "model") -> None:
        """Load the weights of a part into a network. UsageError names the first tensors that do not fit."""
        _load_weights(net, self.weights[part], self.folder / f"{part}.safetensors")


def read_consistent(folder: Path, parts: Sequence[str] = MODEL_PARTS) -> ModelSnapshot:
    """Read the model in a folder, waiting while a run replaces it.

    Raises:
        UsageError: the files do not belong together, and nobody is writing them.
    """
    read_model_config(folder)
    deadline = time.monotonic() + 3 * REPLACE_TIMEOUT_S
    while (snapshot := try_read_consistent(folder, parts)) is None:
        if time.monotonic() > deadline or not _is_recently_written(folder):
            raise UsageError(
                f"{folder}: the weights do not match config.json: damaged, or of another model (if you changed them, "
                "delete crc32 from config.json)"
            )
        time.sleep(POLL_S)
    return snapshot


def try_read_consistent(folder: Path, parts: Sequence[str] = MODEL_PARTS) -> ModelSnapshot | None:
    """Read the model in a folder. None if there is none, or its files do not belong together at the moment."""
    try:
        data = read_config_bytes(folder)
        config = parse_model_config(folder, data)
        checksums = config.get("crc32", {})
        weights = {
            name: (folder / f"{name}.safetensors").read_bytes() for name in parts if _has_part(folder, name, checksums)
        }
        if "model" not in weights or read_config_bytes(folder) != data:
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from error
    if checksums and any(zlib.crc32(part) != checksums[name] for name, part in weights.items()):
        return None
    return ModelSnapshot(folder, config, data, weights)


def _has_part(folder: Path, name: str, checksums: dict[str, int]) -> bool:
    """Return whether a part belongs to this model; the folder may hold one of another model."""
    return (folder / f"{name}.safetensors").is_file() and (name in checksums or not checksums)


def _is_recently_written(folder: Path) -> bool:
    """Return whether a folder was changed less than REPLACE_TIMEOUT_S ago."""
    try:
        return abs(time.time() - folder.stat().st_mtime) < REPLACE_TIMEOUT_S
    except OSError:
        return False


def _load_weights(net: nn.Module, data: bytes, path: Path) -> None:
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError) as error:  # KeyError: a dtype that torch does not have
        raise UsageError(f"{path} cannot be read as safetensors: {error}") from error
    state = net.state_dict()
    mismatches = [name for name in state if name not in tensors]
    mismatches += [name for name in tensors if name not in state]
    if mismatches:
        raise UsageError(f"{path}: another architecture; the first names that differ: {', '.join(mismatches[:3])}")
    for name, value in state.items():
        if value.shape != tensors[name].shape:
            shapes = f"{list(tensors[name].shape)} in the file, {list(value.shape)} in these networks"
            raise UsageError(f"{path}: of another width, resolution or number of classes: {name} is {shapes}")
    with torch.no_grad():
        for name, value in state.items():
            value.copy_(tensors[name])


def find_model_dir(path: Path) -> Path:
    """Return the model folder of a run folder, a model folder or a model.safetensors.

    Raises:
        UsageError: there is no model.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise UsageError(f"{path}: not a safetensors file. Pickles are not loaded, since that can run code")
        path = path.parent
    for folder in (path, path / "model"):
        if (folder / "model.safetensors").is_file() or is_per_label(folder):
            return folder
    if not path.exists():
        raise UsageError(f"{path}: does not exist. Use a run folder of `paragan train`")
    if any(read_yaml(run).get("data", {}).get("only") is not None for run in path.glob("*/run.yaml")):
        raise UsageError(
            f"{path}: holds runs of single labels. Run `paragan pool {path}`, which makes one model of them"
        )
    raise UsageError(f"{path}: no model yet (model/model.safetensors). `paragan train` writes it with each checkpoint")


def is_per_label(folder: Path) -> bool:
    """Return whether a folder holds a per-label model."""
    try:
        return json.loads(read_config_bytes(folder)).get("kind") == PER_LABEL
    except (OSError, ValueError, AttributeError, RecursionError):
        return False
