"""The tensors in a file that somebody else wrote, read without running anything from it."""

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
    """A state dict from safetensors, or from what `torch.save` wrote; also from under a checkpoint's `state_dict`.

    Numbers in half precision become float32, and the prefix that DataParallel gives goes. Unusable where there is
    more in the file than tensors and plain values: reading the rest could run code.
    """
    found = _load_file(path)
    if isinstance(found, Mapping) and isinstance(found.get("state_dict"), Mapping):
        found = found["state_dict"]
    tensors = {str(k): v for k, v in found.items()} if isinstance(found, Mapping) else {}
    strange = [name for name, value in tensors.items() if not isinstance(value, Tensor)]
    if not tensors or strange:
        what = f"{strange[0]} is no tensor" if strange else "it holds no named tensors"
        raise UsageError(f"{path} is no state dict: {what}; give what torch.save(model.state_dict(), ...) wrote")
    prefix = "module." if all(name.startswith("module.") for name in tensors) else ""
    return {name.removeprefix(prefix): _to_float32(value) for name, value in tensors.items()}


def _to_float32(value: Tensor) -> Tensor:
    return value.float() if value.is_floating_point() else value


def _load_file(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about forms of pickles, before they are refused
            return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path} holds more than tensors, and loading that could run code from the file: it is refused. If you "
            "trust it, write its weights alone where it was made: torch.save(model.state_dict(), ...), or safetensors"
        ) from error
    except Exception as error:  # of damaged files torch's reader raises nearly anything
        told = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{path} cannot be read as a state dict: it is damaged, or not what torch.save(model.state_dict(), ...) or "
            f"safetensors wrote ({told})"
        ) from error
