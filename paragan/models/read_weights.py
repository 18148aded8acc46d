"""Read the tensors of a file from elsewhere without running code from it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from paragan.core.errors import UsageError


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a state dict from safetensors, or from a file of `torch.save`, also below the key `state_dict`.

    Half precision becomes float32, and the prefix of DataParallel is removed.

    Raises:
        UsageError: the file holds more than tensors and plain values, which could run code, or no state dict.
    """
    content = _load_file(path)
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    tensors = {str(key): value for key, value in content.items()} if isinstance(content, Mapping) else {}
    others = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if not tensors or others:
        problem = f"{others[0]} is not a tensor" if others else "it holds no named tensors"
        raise UsageError(f"{path}: not a state dict: {problem}. Use a file of torch.save(model.state_dict(), ...)")
    prefix = "module." if all(name.startswith("module.") for name in tensors) else ""
    return {name.removeprefix(prefix): _to_float32(value) for name, value in tensors.items()}


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _load_file(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle formats, which are rejected below
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(f"{path}: does not exist") from error
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: holds more than tensors, and loading it could run code. If you trust it, save its weights alone: "
            "torch.save(model.state_dict(), ...), or safetensors"
        ) from error
    except Exception as error:  # torch raises nearly anything for damaged files
        message = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path}: cannot be read as a state dict: damaged, or not a file of torch.save(model.state_dict(), ...) or "
            f"safetensors ({message})"
        ) from error
