"""The files of a model that belong together, read where a run may be replacing them.

A run replaces its model file by file. config.json comes last, and says by checksums which weights it is about.
"""

from __future__ import annotations

import errno
import json
import math
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

FORMAT_VERSION = 1
MODEL_PARTS = ("model", "discriminator")
REPLACE_TIMEOUT_S, POLL_S = 10.0, 0.05  # how long the files of a model may take to be replaced


@dataclass(frozen=True)
class ModelSnapshot:
    """A model whose weights and config.json belong together."""

    folder: Path
    config: dict[str, Any]
    config_bytes: bytes  # of config.json
    weights: dict[str, bytes]  # model, discriminator: as safetensors

    def write_to(self, folder: Path) -> Path:
        for name, data in self.weights.items():
            atomic_write_bytes(folder / f"{name}.safetensors", data)
        atomic_write_bytes(folder / "config.json", self.config_bytes)
        return folder

    def load_into(self, net: nn.Module, part: str = "model") -> None:
        """Give a network these weights. Unusable lists the first names that do not fit."""
        _load_weights(net, self.weights[part], self.folder / f"{part}.safetensors")


def read_consistent(folder: Path, parts: Sequence[str] = MODEL_PARTS) -> ModelSnapshot:
    """The model in a folder, once it is whole. Unusable where nobody is about to make it so."""
    read_model_config(folder)
    until = time.monotonic() + 3 * REPLACE_TIMEOUT_S
    while (found := try_read_consistent(folder, parts)) is None:
        if time.monotonic() > until or not _is_recently_written(folder):
            raise UsageError(
                f"{folder} holds weights that config.json is not about: they are damaged, or of another model (if you "
                "changed them yourself, delete crc32 from config.json)"
            )
        time.sleep(POLL_S)
    return found


def try_read_consistent(folder: Path, parts: Sequence[str] = MODEL_PARTS) -> ModelSnapshot | None:
    """The model in a folder. None where there is none, or its files do not belong together at the moment."""
    try:
        data = read_config_bytes(folder)
        config = _parse_config(folder, data)
        sums = config.get("crc32", {})
        there = [name for name in parts if _has_part(folder, name, sums)]
        weights = {name: (folder / f"{name}.safetensors").read_bytes() for name in there}
        if "model" not in weights or read_config_bytes(folder) != data:
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: {error.strerror}") from error
    if sums and any(zlib.crc32(found) != sums[name] for name, found in weights.items()):
        return None
    return ModelSnapshot(folder, config, data, weights)


def read_model_config(folder: Path) -> dict[str, Any]:
    """What a model says of itself. Unusable where it cannot be read, or a newer paragan wrote it."""
    try:
        return _parse_config(folder, read_config_bytes(folder))
    except OSError as error:
        raise UsageError(f"{folder}/config.json cannot be read: {error.strerror}") from error


def read_config_bytes(folder: Path) -> bytes:
    """OSError where there is none, and for what would never end, such as a pipe."""
    path = folder / "config.json"
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    return path.read_bytes()


def _parse_config(folder: Path, data: bytes) -> dict[str, Any]:
    try:
        config = json.loads(data)
        written, about = int(config["format"]), {**config, "kimg": float(config.get("kimg", 0))}
        if not all(isinstance(found, int) for found in dict(config.get("crc32", {})).values()):
            raise TypeError("crc32 should hold whole numbers")
        if not 0 <= about["kimg"] < math.inf:
            raise ValueError("kimg should be 0 or more")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UsageError(f"{folder}/config.json cannot be read: {error!r}") from error
    if written > FORMAT_VERSION:
        raise UsageError(f"{folder} has model format {written}; this paragan reads up to {FORMAT_VERSION}")
    return about


def _has_part(folder: Path, name: str, sums: dict[str, int]) -> bool:
    """Whether a part is of this model: another one's may lie beside it."""
    return (folder / f"{name}.safetensors").is_file() and (name in sums or not sums)


def _is_recently_written(folder: Path) -> bool:
    """Whether somebody was writing in a folder a moment ago."""
    try:
        return abs(time.time() - folder.stat().st_mtime) < REPLACE_TIMEOUT_S
    except OSError:
        return False


def _load_weights(net: nn.Module, data: bytes, path: Path) -> None:
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError) as error:  # the second of a kind of number that torch has not
        raise UsageError(f"{path} cannot be read as safetensors: {error}") from error
    own = net.state_dict()
    wrong = [n for n in own if n not in tensors] + [n for n in tensors if n not in own]
    wrong += [n for n in own if n in tensors and own[n].shape != tensors[n].shape]
    if wrong:
        raise UsageError(f"{path} holds another architecture; the first names that differ: {', '.join(wrong[:3])}")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(tensors[name])
